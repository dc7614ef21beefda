"""Intervals as text."""


def cell(value: list, digits: int, sign: str = "") -> str:
    """[mean, low, high] as "mean [low, high]", the mean alone where there is no interval; `sign` "+" shows every sign."""
    mean, low, high = value
    return f"{mean:{sign}.{digits}f}" + (f" [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]" if low is not None else "")
