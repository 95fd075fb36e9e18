"""The `calibrate` command: each group of commands in a module of its own. What one needs is imported when it runs."""

from __future__ import annotations

import typer

from calibrate.commands import (
    decode_command,
    family_commands,
    fit_command,
    import_command,
    layers_command,
    links_command,
    log_command,
    quality_command,
    report_command,
    run_command,
)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Profiles of hardware, imported or measured, and small real models to try methods on.",
    epilog="Start with: calibrate layers --model llama-68m --quick -o profiles",
)  # fmt: skip
import_command.register(app)
layers_command.register(app)
links_command.register(app)
fit_command.register(app)
report_command.register(app)
family_commands.register(app)
decode_command.register(app)
log_command.register(app)
quality_command.register(app)
run_command.register(app)


def main() -> None:
    """Entry point of the `calibrate` command."""
    app()
