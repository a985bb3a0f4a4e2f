"""Where the ranks of a job find each other: a store on one node, or that of torchrun."""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

MEETING_S = 300.0  # what slow nodes get to appear
LOADING_S = 3600.0  # what a rank may load longer than another; hangs of a step are found by the engine's watch
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """One process's place in the job. `local` counts ranks of this machine, as does `machine`, all of them.

    `launched`: an outer launcher started the processes; otherwise the head starts the others.
    """

    rank: int
    world: int
    local: int
    machine: int
    address: str
    port: int
    launched: bool

    def store(self) -> Store:
        """The job's key-value store; the head's process holds it where no launcher does."""
        holds = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = TCPStore(
            self.address,
            self.port,
            is_master=self.launched and holds,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEETING_S),
        )
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"anabranch-{restart}", store)

    def own_address(self) -> str:
        """The address under which the other ranks reach this process."""
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((self.address, self.port))  # sends nothing
                return probe.getsockname()[0]
        except OSError as error:
            raise ValueError(f"MASTER_ADDR={self.address}: {error.strerror or error}") from None


def from_environment(world: int) -> Rendezvous | None:
    """This process's place as torchrun put it into the environment; None without torchrun, or for one rank.

    Raises:
        ValueError: the launcher started another number of processes than the layout has ranks, or a variable is wrong.
    """
    if world == 1 or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    given = int(os.environ["WORLD_SIZE"])
    if given != world:
        raise ValueError(f"WORLD_SIZE={given}: the layout (tp x pp) has {world} ranks; start one process for each")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"RANK is set but {missing[0]} is not; start the ranks with torchrun")
    rank = int(os.environ["RANK"])
    return Rendezvous(
        rank=rank,
        world=world,
        local=int(os.environ.get("LOCAL_RANK", rank)),
        machine=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        address=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        launched=True,
    )


def on_this_node(world: int) -> tuple[Rendezvous, Store]:
    """The head's place in a job of this machine alone, and the store that it must keep alive."""
    store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    head = Rendezvous(rank=0, world=world, local=0, machine=world, address=_LOOPBACK, port=store.port, launched=False)
    return head, store
