"""A user's mistake is one clear sentence and exit code 2, never a traceback."""
import sys


class UserError(Exception):
    """Something the user can put right; its message is one sentence that names the file, flag or field."""


def exit_cleanly(main) -> None:
    """Run a command's `main()`; print a UserError as one line on standard error and exit with code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
