"""The program of the sidecar on a machine for feeders: starts and serves its feeder processes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn

import msgspec

from spotfit.code.code_bundle import DATASETS
from spotfit.core.codec import decoder
from spotfit.model.topology import FeederAddress
from spotfit.protocol.agent_sidecar import (
    FeedersListening,
    SidecarInit,
    StartFeeders,
    ToFeederNode,
)
from spotfit.sidecar.process_setup import SidecarConnection, SidecarRun, exit_sidecar
from spotfit.store.retry import PATIENT_RETRY_POLICY
from spotfit.worker.main import configure_logging

if TYPE_CHECKING:
    from spotfit.data.feeding.feeder_server import FeederServer

_message_decoder: msgspec.json.Decoder[ToFeederNode] = decoder(ToFeederNode)  # type: ignore[arg-type]


def main(socket_fd: int) -> NoReturn:
    """Serve feeders until the agent closes the socket, then exit the process.

    `socket_fd`: the inherited end of a socket pair. An error, such as of the user's environment
    or of processes that cannot be started, ends the process; its text is in the log.
    """
    connection = SidecarConnection(socket_fd, _message_decoder)
    init, start = connection.receive(), connection.receive()
    if not isinstance(init, SidecarInit) or not isinstance(start, StartFeeders):
        exit_sidecar()  # the agent is gone
    configure_logging(start.log_level)
    server = open_server(init, start)
    feeder = FeederAddress(address=server.address, connections=start.processes)
    connection.send(FeedersListening(feeder=feeder))
    serve_for_agent(server, connection)
    exit_sidecar()


def serve_for_agent(server: FeederServer, connection: SidecarConnection[ToFeederNode]) -> None:
    """Serve until the agent closes the socket. Raises what `server.serve` raises.

    Feeders and their processes have ended afterwards.
    """

    def close_with_agent() -> None:
        while connection.receive() is not None:
            pass  # the agent sends nothing more
        server.close()

    threading.Thread(target=close_with_agent, name="spotfit-feeder-agent", daemon=True).start()
    try:
        server.serve()
    finally:
        server.close()


def open_server(init: SidecarInit, start: StartFeeders) -> FeederServer:
    """Make the user's code importable and start the feeder processes of this machine.

    Changes environment variables, `sys.path` and the working directory, which the processes
    inherit. Raises the errors of `SidecarRun.load_code` and `FeederServer`.
    """
    # Not before the fork: PyArrow starts a thread, and only machines for feeders need it.
    from spotfit.data.feeding.feeder_process import FeederInit
    from spotfit.data.feeding.feeder_server import FeederServer

    payload = SidecarRun(init, PATIENT_RETRY_POLICY).load_code()
    return FeederServer(
        FeederInit(
            log_level=start.log_level,
            secret=init.secret,
            run_id=init.run_id,
            scratch_dir=init.scratch_dir,
        ),
        payload.object_pickles[DATASETS],
        processes=start.processes,
    )
