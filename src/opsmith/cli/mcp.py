"""`opsmith mcp`: a server of the Model Context Protocol, whose tools check operators for agents."""

from __future__ import annotations

from opsmith import errors
from opsmith.cli.guard import guarded
from opsmith.extras import install


def mcp() -> None:
    """Serve tools for agents by the Model Context Protocol, on stdin and stdout.

    `check` finds faults of operators and their lines; `explain` names the implementation of a call; `emulate`
    runs a CUDA kernel on the CPU; `rule` explains an error or a cause. Code runs only in child processes with
    a time limit, as with `opsmith check --isolate`.

    **Examples**

    - `opsmith mcp` as the command of a server in the settings of an agent

    Exit status: 0 the client has closed the connection, 2 the package `mcp` is missing.
    """
    with guarded():
        try:
            from opsmith.cli.mcp_server import server
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "mcp":
                raise
            raise errors.MissingExtraError(
                "the server for agents needs the package `mcp`",
                got="no module named 'mcp'",
                hint=install("mcp"),
            ) from error
        server().run("stdio")
