"""Command lines: one dataclass field per flag."""
from dataclasses import field

from oar.errors import UserError


def flag(default, help: str):
    """A dataclass field with its default and the text of --help."""
    if isinstance(default, list):
        return field(default_factory=lambda: default, metadata={"help": help})
    return field(default=default, metadata={"help": help})


def parse_flags(parser, argv: list[str]) -> tuple:
    """One dataclass per type of an HfArgumentParser; UserError for an unknown argument or a value that cannot be one."""
    def refuse(message: str) -> None:                # in place of argparse's page of usage
        raise UserError(f"{message} (see --help)")

    parser.error = refuse
    *configs, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        raise UserError(f"unknown argument {unknown[0]} (see --help)")
    return tuple(configs)
