"""A key-value cache that grows in place.

transformers' DynamicCache copies all it holds whenever a token is added.  This one writes new keys and values into a
buffer with room for more, and is otherwise the same cache.  (For inference only: gradients want the copies.)
"""
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

ROOM = 64     # columns added when a buffer is full


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer: views (N, heads, length, d) of two buffers with columns to spare."""
    spare = 0

    def hold(self, keys: torch.Tensor, values: torch.Tensor, room: int) -> "GrowingLayer":
        """Keep a copy of keys and values (N, heads, length, d) with room for more columns behind it."""
        self.buffers = []
        for kept in (keys, values):
            buffer = kept.new_empty(*kept.shape[:2], kept.shape[2] + room, kept.shape[3])
            buffer[:, :, :kept.shape[2]] = kept
            self.buffers.append(buffer)
        self.device, self.is_initialized, self.spare = keys.device, True, room
        self._view(keys.shape[2])
        return self

    def _view(self, length: int) -> None:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append (N, heads, new, d); returns all keys and values."""
        new = key_states.shape[2]
        if not self.is_initialized:
            self.hold(key_states[:, :, :0], value_states[:, :, :0], new + ROOM)
        elif self.spare < new:
            self.hold(self.keys, self.values, new + ROOM)
        start = self.keys.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, start:start + new] = states
        self.spare -= new
        self._view(start + new)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows; they get buffers of their own with the next token."""
        super().batch_select_indices(indices)
        self.spare = 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.spare = 0


def growing_cache() -> Cache:
    """An empty cache for decoding."""
    return Cache(layer_class_to_replicate=GrowingLayer)


def prefix_cache(cache: Cache, rows: list[int], columns: int, room: int) -> Cache:
    """A copy of the first `columns` columns of `rows` (repeats allowed) with room for `room` more."""
    return Cache(layers=[GrowingLayer().hold(layer.keys[rows, :, :columns], layer.values[rows, :, :columns], room)
                         for layer in cache.layers])
