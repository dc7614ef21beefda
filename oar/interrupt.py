"""SIGINT and SIGTERM: finish the step, save, and say how to go on."""
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred():
    """Within, the first signal is only noted; the function given returns its number, 0 as long as there is none.

    A second one ends the process at once, as it would have without us: what was saved before stays whole.
    """
    caught = [0]

    def note(number: int, frame) -> None:
        caught[0] = number
        restore()
        said = f"\n{signal.Signals(number).name}: stops when this step is finished and saved; a second one stops at once\n"
        os.write(2, said.encode())                   # print could meet itself here, halfway through another line

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield lambda: caught[0]
    finally:
        restore()


def leave(number: int, step: int, steps: int, run: Path) -> None:
    """End the process with the signal's exit code, 128 + its number, after saying how to resume."""
    print(f"stopped by {signal.Signals(number).name} after step {step} of {steps}; go on with  python train.py --resume {run}",
          file=sys.stderr, flush=True)
    sys.exit(128 + number)


@contextmanager
def at_once(message: str):
    """Within, either signal ends the process where it stands, with `message` and exit code 128 + its number."""
    def stop(number: int, frame) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        print(f"\n{message}", file=sys.stderr, flush=True)
        sys.exit(128 + (error.args[0] if error.args else signal.SIGINT))
    finally:
        signal.signal(signal.SIGTERM, before)
