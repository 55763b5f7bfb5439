"""The command `dapo NAME ...`, also as `python -m dapo NAME ...`: each name is the module that `python -m` runs."""

import difflib
import runpy
import sys

import dapo
from dapo.ground.uncaught import install

COMMANDS = {
    "train": ("main_ppo", "start or continue a run"),
    "evaluate": ("tools.evaluate", "avg@n, pass@k, maj@k of a model on held-out problems"),
    "inspect": ("tools.inspect", "what a run sampled and why: tables, findings, a page"),
    "compare": ("tools.compare", "runs side by side, with intervals"),
    "plot": ("tools.plot", "learning curves of runs as a picture"),
    "replay": ("tools.replay", "take a step of a run again, from its batch"),
    "plan": ("tools.plan", "memory per GPU and seconds per step, before you rent"),
    "doctor": ("tools.doctor", "check machine, model, data and network before a run"),
    "translate": ("tools.translate", "a verl or TRL run as a dapo experiment"),
    "selfcheck": ("rewards.selfcheck", "a reward function against the answers of a data set"),
    "config": ("config", "what a key means; all keys"),
    "scale": ("tools.scale", "engines join or leave a run while it goes on"),
    "leave": ("tools.leave", "tell a run that this node goes, or let the cloud tell it"),
    "serve": ("workers.engines.serve", "an engine outside of the Ray cluster of a run"),
    "simulate": ("tools.simulate", "the buffer on simulated fleets"),
    "ablation": ("tools.ablation", "the paper's techniques one by one"),
    "bench": ("tools.bench", "seconds of a step and its parts"),
}


def main() -> None:
    install()
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("dapo COMMAND [ARGUMENT ...], where COMMAND is one of\n")
        print("\n".join(f"  {command:10} {what}" for command, (_, what) in COMMANDS.items()))
        print("\n`dapo COMMAND --help` says what it takes.")
    elif name == "--version":
        print(f"dapo {dapo.__version__}")
    elif name in COMMANDS:
        sys.argv = [f"dapo {name}", *rest]
        runpy.run_module(f"dapo.{COMMANDS[name][0]}", run_name="__main__", alter_sys=True)
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `{near[0]}`? " if near else ""
        sys.exit(f"dapo: no command `{name}`; {hint}There are: {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main()
