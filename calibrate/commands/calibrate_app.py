"""The `calibrate` command. Each command has a separate module, which imports its dependencies when the command runs."""

from __future__ import annotations

import typer

from calibrate.commands import (
    decode_command,
    engine_command,
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
from calibrate.commands.common_options import RenamedOptions
from model.base.command_help import SETTINGS, DocumentedGroup, run_program, version_option

app = typer.Typer(
    cls=DocumentedGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=SETTINGS,
    callback=version_option,
    help="Import or measure hardware profiles, and run decoding methods on real models.",
    epilog="Start with: calibrate layers --model llama-68m --quick -o profiles",
)  # fmt: skip
app.add_typer(import_command.importing, name="import")
app.add_typer(fit_command.fitting, name="fit")
app.add_typer(engine_command.engine, name="engine")
for command in (
    import_command.bundle, layers_command.layers, links_command.links, report_command.report, family_commands.train,
    family_commands.heads, family_commands.align, decode_command.decode, log_command.log, log_command.rates,
    quality_command.quality, quality_command.replace, quality_command.loss, run_command.run,
):  # fmt: skip
    app.command(cls=RenamedOptions)(command)


def main() -> None:
    """Entry point of the `calibrate` command."""
    run_program(app)
