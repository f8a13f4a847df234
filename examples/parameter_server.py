"""A parameter server and its trainers, on handwritten digits.

The server holds the model.  Each trainer computes gradients on its own part of the data
and sends them; the server waits until it has those of all trainers, makes one step, and
answers them all with the new parameters.  That is `async_execution`: the server's
function returns a future, so no thread of it waits while gradients trickle in.

All in one, with a broker of its own:

    python examples/parameter_server.py

Or with workers that you have started elsewhere (`zrpc broker` in a first terminal):

    zrpc worker --name ps --import examples/parameter_server.py
    zrpc worker --name trainer --nproc 2 --import examples/parameter_server.py
    python examples/parameter_server.py --broker tcp://127.0.0.1:5555 --trainers trainer-0,trainer-1
"""

from __future__ import annotations

import threading
import time
from typing import Any

import click
import torch
from torch import nn
from torch.multiprocessing.spawn import start_processes

import zrpc as rpc

SERVER = "ps"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images and labels, held-out images and labels."""
    from sklearn.datasets import load_digits as load  # part of the extra `zrpc[examples]`

    digits = load()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, training = order[:360], order[360:]
    return images[training], labels[training], images[held_out], labels[held_out]


class ParameterServer:
    """Holds the model; one step for each round of gradients."""

    def __init__(self, trainers: int, steps: int) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.trainers = trainers
        self.steps = steps
        self.step = 0
        self.loss = float("nan")
        self.losses: list[float] = []
        self.lock = threading.Lock()
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.optimizer.zero_grad(set_to_none=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    @rpc.functions.async_execution
    def update(self, gradients: list[torch.Tensor], loss: float) -> torch.futures.Future[Any]:
        """Add a trainer's gradients; the answer comes when all have sent theirs."""
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient / self.trainers
            self.losses.append(loss)
            future = self.future
            if len(self.losses) == self.trainers:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.loss = sum(self.losses) / len(self.losses)
                self.losses = []
                self.step += 1
                self.future = torch.futures.Future()
                # Copies: the next step changes the parameters in place.
                future.set_result([parameter.clone() for parameter in self.parameters()])
        return future

    def progress(self) -> tuple[int, float]:
        return self.step, self.loss

    def accuracy(self) -> float:
        _, _, images, labels = load_digits()
        self.model.eval()
        with torch.no_grad():
            return float((self.model(images).argmax(1) == labels).float().mean())


def train(server: rpc.RRef[Any], part: int, parts: int, steps: int) -> tuple[int, int]:
    """One trainer's whole work, run on its worker; returns calls made and bytes moved."""
    torch.set_num_threads(1)
    images, labels, _, _ = load_digits()
    images, labels = images[part::parts], labels[part::parts]
    model = make_model()
    loss_function = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(part)
    calls = moved = 0
    parameters = server.rpc_sync().parameters()
    for _ in range(steps):
        with torch.no_grad():
            for mine, new in zip(model.parameters(), parameters, strict=True):
                mine.copy_(new)
        batch = torch.randint(len(labels), (64,), generator=generator)
        loss = loss_function(model(images[batch]), labels[batch])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        parameters = server.rpc_sync().update(list(gradients), loss.item())
        calls += 1
        moved += sum(tensor.nbytes for tensor in (*gradients, *parameters))
    return calls, moved


def drive(trainers: list[str], steps: int) -> None:
    """Make the server, start the trainers, show how they get on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    start = time.monotonic()
    server = rpc.remote(SERVER, ParameterServer, args=(len(trainers), steps))
    work = [
        rpc.rpc_async(name, train, args=(server, part, len(trainers), steps), timeout=0)
        for part, name in enumerate(trainers)
    ]
    console = Console()
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    shown = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=steps, loss=float("nan"))
        while not all(future.done() for future in work):
            step, loss = server.rpc_sync().progress()
            bar.update(task, completed=step, loss=loss)
            if not console.is_terminal and step - shown >= steps // 10:
                shown = step
                print(f"step {step}/{steps}  loss {loss:.3f}", flush=True)
            time.sleep(0.1)
        bar.update(task, completed=steps)
    results = rpc.wait_all(work)
    elapsed = time.monotonic() - start
    calls = sum(result[0] for result in results)
    moved = sum(result[1] for result in results)
    accuracy = server.rpc_sync().accuracy()
    print(
        f"{calls} calls in {elapsed:.1f} s: {calls / elapsed:.0f} calls/s, "
        f"{moved / 1e6:.0f} MB moved, {moved / elapsed / 1e6:.1f} MB/s"
    )
    print(f"accuracy {accuracy:.2f}")


def run_rank(rank: int, names: list[str], steps: int, init_method: str) -> None:
    """One process of the all-in-one run; the last rank drives."""
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), init_method=init_method)
    if rank == len(names) - 1:
        drive(names[1:-1], steps)
    rpc.shutdown()


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--trainers", default="2", help="How many to start, or names of workers that run.")
@click.option("--steps", default=400, show_default=True, help="Steps of the server.")
@click.option(
    "--broker", help="Address of a broker whose workers to use; default: start everything."
)
def main(trainers: str, steps: int, broker: str | None) -> None:
    if broker:
        options = rpc.RpcBackendOptions(broker=broker)
        rpc.init_rpc("driver", rpc_backend_options=options)
        drive(trainers.split(","), steps)
        rpc.shutdown()
        return
    import tempfile

    names = [SERVER, *(f"trainer{n}" for n in range(int(trainers))), "driver"]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            run_rank,
            args=(names, steps, f"file://{folder}/rendezvous"),
            nprocs=len(names),
            start_method="spawn",
        )


if __name__ == "__main__":
    # Import ourselves: functions of `parameter_server` can be found by workers that have
    # imported that module, those of `__main__` only by processes that run this very script.
    import parameter_server  # type: ignore[import-not-found]

    parameter_server.main()
