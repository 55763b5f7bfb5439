"""Command line of the benchmarks: `python -m dapo.bench COMMAND [options] [key=value ...]`. `README.md` in this folder
describes what each command measures. The module of a command, and with it torch and Ray, is imported only when it runs.
`python -m dapo.bench short|long|both [steps]` is short for `python -m dapo.bench step ...`."""

import argparse
import pkgutil
import sys
from collections.abc import Sequence

from dapo.config.actor import TRANSPORTS
from dapo.config.devices import PEAK_FLOPS
from dapo.tools.bench.shapes import LENGTHS, MODELS, SYNC_SHAPES

OVERRIDES = (
    "key=value words are overrides of the configuration, as dapo.main_ppo takes them; without +experiment=NAME among "
    "them it is dapo_tiny's."
)


def parser() -> argparse.ArgumentParser:
    program = argparse.ArgumentParser(prog="dapo bench", description="Benchmarks of a step and its parts.")
    commands = program.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, module: str, function: str, what: str, *, overrides: bool = True) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=what,
            description=f"Measures {what}.",
            epilog=OVERRIDES if overrides else None,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        added.set_defaults(entry=f"dapo.bench.{module}:{function}", overrides=overrides)
        return added

    step = command("step", "step", "run", "whole steps against the engines alone and a bare update")
    step.add_argument("shape", nargs="?", choices=(*LENGTHS, "both"), default="both", help="lengths of the responses")
    step.add_argument("steps", nargs="?", type=positive, default=10, help="measured steps of each shape")
    step.add_argument("--model", help="long answers of random weights of this shape, without the floors")
    rewards = command("rewards", "rewards", "run", "throughput and latency of scoring", overrides=False)
    rewards.add_argument("--function", default="math", help="math, math_verify, gsm8k, or the path of your own")
    rewards.add_argument("--children", type=positive, default=1, help="child processes of the one reward worker")
    rewards.add_argument("--responses", type=positive, default=20_000)
    _gpu(command("gpu", "gpu", "run", "a GPU in a few minutes: one page of updates, generation, turns and weight sync"))
    _device(command("device", "device", "run", "updates of one rank on one GPU at the shapes of real models"))
    _cycle(command("cycle", "cycle", "run", "engines and actors that take turns on the same GPU"))
    _host(command("host", "host", "run", "what an engine asks of its host's processor for each token"))
    _driver(
        command("driver", "driver", "run", "the driver of a large fleet, against engines that sleep", overrides=False)
    )
    _sync(command("sync", "sync", "run", "whole weight syncs by transport", overrides=False))
    return program


def _models(
    command: argparse.ArgumentParser, models: Sequence[str], folder: str = "where the random weights go for a while"
) -> None:
    command.add_argument("--models", nargs="+", default=list(models), help="names in config/models, or directories")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    command.add_argument("--folder", help=f"{folder} (7B: 15 GB)")


def _gpu(gpu: argparse.ArgumentParser) -> None:
    _models(gpu, MODELS, "where the random weights go, and stay for the next call")
    gpu.add_argument("--minutes", type=float, default=8, help="what cannot end within them is left out")
    gpu.add_argument("--output", default="gpu.md", help="the page; beside it .json, from which the next call goes on")
    gpu.add_argument("--tokens", type=positive, nargs="+", default=[4096, 20_480], help="of a micro-batch of an update")
    gpu.add_argument("--answers", type=positive, nargs="+", default=[2048, 20_480], help="tokens of generated answers")
    gpu.add_argument("--requests", type=positive, nargs="+", default=[512, 96], help="that run at once, of each length")


def _device(device: argparse.ArgumentParser) -> None:
    _models(device, MODELS)
    device.add_argument("--repeats", type=positive, default=3, help="measured updates")
    device.add_argument("--tokens", type=positive, nargs="+", default=[4096, 20_480], help="of one micro-batch")
    device.add_argument("--sequences", type=positive, default=1, help="equal sequences in a micro-batch")
    device.add_argument("--micro-batches", type=positive, default=4, help="of one update")
    device.add_argument("--peak-flops", type=float, default=PEAK_FLOPS["H200"], help="of the device, per second")
    device.add_argument("--output", default="bench_device.jsonl", help="where the rows are appended")


def _cycle(cycle: argparse.ArgumentParser) -> None:
    _models(cycle, MODELS)
    cycle.add_argument("--cycles", type=positive, default=20, help="measured ones")
    cycle.add_argument("--tokens", type=int, default=4096, help="of the update in each cycle; 0: none")
    cycle.add_argument("--bucket-mib", type=positive, default=1024, help="of the weight sync")


def _host(host: argparse.ArgumentParser) -> None:
    _models(host, MODELS[:1])
    host.add_argument("--requests", type=positive, nargs="+", default=[64, 512], help="that run at once")
    host.add_argument("--prompts", type=positive, nargs="+", default=[8], help="tokens of a prompt, of all or of each")
    host.add_argument("--tokens", type=positive, default=1024, help="of a response at most")
    host.add_argument("--rounds", type=positive, default=3, help="measured rounds of each")


def _sync(sync: argparse.ArgumentParser) -> None:
    sync.add_argument("--shape", choices=SYNC_SHAPES, default="100m", help="of the model")
    sync.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=["auto"])
    sync.add_argument("--ranks", type=positive, default=2, help="actor ranks")
    sync.add_argument("--engines", type=positive, default=1)
    sync.add_argument("--colocate", action="store_true", help="engines and ranks share GPUs; needed for ipc there")
    sync.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")
    sync.add_argument("--bucket-mib", type=positive, default=256)
    sync.add_argument("--turns", type=positive, default=3, help="of each transport")
    sync.add_argument("--syncs", type=positive, default=2, help="counted syncs of a turn")


def _driver(driver: argparse.ArgumentParser) -> None:
    driver.add_argument("--engines", type=positive, nargs="+", default=[16, 256, 4096], help="sizes of the fleet")
    driver.add_argument("--slots", type=positive, default=64, help="responses that an engine runs at once")
    driver.add_argument("--n", type=positive, default=16, help="responses per prompt")
    driver.add_argument("--tokens", type=positive, default=5000, help="of a response, on average")
    driver.add_argument("--tokens-per-s", type=float, default=60.0, help="speed of one slot")
    driver.add_argument("--buckets", type=positive, default=32, help="of a weight sync")
    driver.add_argument("--seconds", type=float, default=60.0, help="measured ones, of the engines' time")
    driver.add_argument("--ray", action="store_true", help="engines and reward workers are Ray actors, time is real")


def positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number of at least 1")
    return int(word)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options; `overrides` collects the `key=value` words, which may stand anywhere."""
    program = parser()
    overrides = [word for word in arguments if "=" in word and not word.startswith("-")]
    words = [word for word in arguments if word not in overrides]
    given = program.parse_args(["step", *words] if words[:1] in (["short"], ["long"], ["both"]) else words)
    if overrides and not given.overrides:
        program.error(f"this command takes no overrides ({' '.join(overrides)}); its options are in its --help")
    given.overrides = overrides
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        pkgutil.resolve_name(given.entry)(given)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"dapo.bench: {error}")


if __name__ == "__main__":
    main()
