"""Which check each piece of code in README.md and docs/*.md belongs to.

Python, diff, YAML and Dockerfile blocks are checked by their kind, so a new one is checked without further ado. Every
command needs an entry in exactly one of the tables below. `tests/distributed/test_documentation.py` and
`tests/docker/test_documentation.py` run what the tables say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.distributed.pages import Unit


@dataclass(frozen=True)
class Run:
    """How a documented command is run small."""

    append: str = ""
    """Arguments behind it, which override earlier ones."""
    replace: tuple[str, str] = ("", "")
    """A part of the command, and what stands there in the test."""
    prints: str = ""
    """What its output has to contain."""
    is_slow: bool = False
    """Whether only a run of all tests runs it: a variant of a command that every run tries."""

    def small(self, command: str) -> str:
        """Return the command as the test runs it."""
        old, new = self.replace
        if old not in command:
            raise ValueError(f"{old!r} is not in {command!r}")
        return f"{command.replace(old, new) if old else command} {self.append}".strip()


# The launchers' table of README.md, where train.py runs every Python block of these pages: launcher's ranks.
# Those of VARIANTS differ from others in the launcher alone, under which the checks of `jobs` run; they are slow.
VARIANTS = (
    "horovodrun --gloo -np 2 python train.py",
    "mpirun -np 2 --bind-to none python train.py",
    "torchrun --nproc-per-node 2 train.py",
)
LAUNCHED = {
    "python train.py": 1,
    "horovodrun -np 2 python train.py": 2,
    "horovodrun --gloo -np 2 python train.py": 2,
    "mpirun -np 2 --bind-to none python train.py": 2,
    "torchrun --nproc-per-node 2 train.py": 2,
}
# The same in tests/distributed/test_srun.py, which starts a Slurm.
UNDER_SLURM = {"srun --mpi=pmix -n 2 python train.py": 2}

_DIGITS = "--dataset digits --epochs 1"
_MNIST = Run(append=f"{_DIGITS} --output none", prints="evaluated 297/297")
# As tests/distributed/test_language_model.py runs them, and asks for the losses.
_LANGUAGE_MODEL = Run("--epochs 1 --bytes 20000 --length 64", prints="epoch 1/1: test loss", is_slow=True)
_DOCTOR = Run("|| test $? = 1", prints="trainer doctor: ")
_FSDP_CHECKPOINTS = "benchmarks/fsdp_checkpoints.py runs/fsdp --size 100m --files auto"
HERE = {
    "source .venv/bin/activate": Run(append="&& command -v horovodrun", prints="/.venv/bin/horovodrun"),
    "make help": Run(prints="check-gpu"),
    'make fuzz ARGS="--only watcher --inputs 1000"': Run(prints="nothing was found"),
    "python examples/mnist.py --help": Run(prints="--target-accuracy", is_slow=True),
    "horovodrun -np 2 python scripts/comm_bench.py": Run(
        append="--sizes 4 --repeats 1 --only mpi", prints="ranks: 2", is_slow=True
    ),
    "diff -y -W 230 examples/language_model_plain.py examples/language_model.py": Run(
        append="|| test $? = 1", prints="run = trainer.init("
    ),
    "diff -y -W 230 examples/mnist_plain.py examples/mnist.py": Run(
        append="|| test $? = 1", prints="run = trainer.init("
    ),
    "python examples/language_model_plain.py --no-shuffle": _LANGUAGE_MODEL,
    "horovodrun -np 2 python examples/language_model.py --no-shuffle": _LANGUAGE_MODEL,
    "horovodrun -np 2 python examples/mnist.py --checkpoint runs/checkpoints --checkpoint-every 30s --keep 3": Run(
        append=f"{_DIGITS} --output none --checkpoint $(mktemp -d)", prints="evaluated 297/297"
    ),
    "trainer run -np 2 python examples/mnist.py": replace(_MNIST, is_slow=True),
    "trainer doctor": replace(_DOCTOR, is_slow=True),
    "trainer doctor --gpu": _DOCTOR,
    "trainer --version": Run(prints="trainer 0."),
    "horovodrun -np 2 python examples/mnist.py": replace(_MNIST, is_slow=True),
    # As tests/distributed/test_trace.py runs them, and looks at what they have written.
    "horovodrun -np 2 trainer trace trace.json examples/mnist.py --epochs 1": Run(
        replace=("trace.json", "$(mktemp -d)/trace.json"),
        append=f"{_DIGITS} --output none",
        prints="/trace.json; https://ui.perfetto.dev shows it",
        is_slow=True,
    ),
    "torchrun --nproc-per-node 2 --no-python -- trainer trace trace.json train.py": Run(
        replace=("trace.json train.py", f"$(mktemp -d)/trace.json examples/mnist.py {_DIGITS} --output none"),
        prints="/trace.json; https://ui.perfetto.dev shows it",
        is_slow=True,
    ),
    "trainer env": Run(prints="Horovod has mpi, gloo"),
    "TRAINER_TEST_DEVICE=cpu python -m pytest tests/gpu": Run(append="-k parts_of_a_step", prints="1 passed"),
    "NCCL_MULTI_RANK_GPU_ENABLE=1 horovodrun -np 4 python examples/mnist.py": replace(_MNIST, is_slow=True),
    "python benchmarks/commit_faults.py --random-kills 1000": Run(
        replace=("1000", "5"), append="--damages 1", prints="| killed at a random moment | 5 |", is_slow=True
    ),
    "torchrun --nproc-per-node 4 benchmarks/fsdp_memory.py --size 10m --strategy fsdp": Run(
        replace=("4 ", "2 "), append="--size 1m", prints="| fsdp | 2 | 2.1 | 2.1 | 4.3 | 8.6 |", is_slow=True
    ),
    f"torchrun --nproc-per-node 4 {_FSDP_CHECKPOINTS}": Run(
        replace=(f"4 {_FSDP_CHECKPOINTS}", "2 benchmarks/fsdp_checkpoints.py $(mktemp -d) --size 1m"),
        prints="| auto | 2 | ",
        is_slow=True,
    ),
    f"torchrun --nproc-per-node 4 {_FSDP_CHECKPOINTS} --resume": Run(
        replace=(f"4 {_FSDP_CHECKPOINTS}", "2 benchmarks/fsdp_checkpoints.py $(mktemp -d) --size 1m"),
        prints="| auto | 2 | ",
        is_slow=True,
    ),
    "torchrun --nproc-per-node 2 benchmarks/grpc_stream.py": Run(
        append="--megabytes 2 --rounds 2", prints="| gRPC alone, threads | ", is_slow=True
    ),
    "trainer merge runs/checkpoints whole.pt": Run(
        replace=(
            "trainer merge runs/checkpoints whole.pt",
            f"folder=$(mktemp -d) && python examples/mnist.py {_DIGITS} --output none --checkpoint $folder/all "
            "&& trainer merge $folder/all $folder/whole.pt",
        ),
        prints=" bytes, of no parts of attempt-0001-epoch-0001-update-",
        is_slow=True,  # tests/unit/test_checkpoint_parts.py calls it
    ),
    "python -m benchmarks.busy --data-dir /path/to/data --rounds 3": Run(
        append="--networks transformer --only ours --conditions 1 --rounds 1",
        prints="| one busy process | loop on ",
        is_slow=True,
    ),
    "python benchmarks/profile_step.py": Run(append="--rows 3 --steps 5", prints="aten::", is_slow=True),
    "OMP_NUM_THREADS=1 python benchmarks/overhead.py": Run(
        append="--pairs 3 --steps 5", prints="benchmark-report: ", is_slow=True
    ),
    "horovodrun -np 2 python examples/mnist.py --network tutorial --no-channels-last --batch-size 100 --lr 0.01 "
    "--momentum 0.5 --decay none --epochs 2 --output none": replace(_MNIST, is_slow=True),
    "horovodrun -np 2 python scripts/timed.py --steps 40 t.jsonl examples/language_model.py --length 128 "
    "--bytes 400000 --epochs 1": Run(
        replace=("--steps 40", "--steps 5"),
        append="--bytes 20000 --length 64",
        prints="epoch 1/1: test loss",
        is_slow=True,  # the scaling test runs it under DDP
    ),
    "python scripts/scaling_test.py --batch-size 16 --global-batch examples/image_folder.py --workers 0": Run(
        replace=("examples/", "--scaling weak --steps 2 --repeats 1 --output $(mktemp -d) examples/"),
        append="--size 40",
        prints="1x2 under horovod: efficiency",
        is_slow=True,
    ),
    'python -c "import torch.distributed as d; print(d.Backend.backend_list)"': Run(
        prints="['undefined', 'gloo', 'nccl', 'xccl', 'ucc', 'mpi', 'fake']"
    ),
}

_TIMED = Run(append=f"{_DIGITS} --output none --batch-size 40", prints="epoch 1/1")
# One strategy and one shape; a batch that leaves four ranks enough steps of the 1,500 digits.
_SCALING = "--strategies horovod --scaling weak --shapes 2x2 --batch-size 40 --steps 3 --repeats 1"
_SCRIPT = f"examples/mnist.py {_DIGITS} --output none"
_EFFICIENCY = "2x2 under horovod: efficiency"


def _scaling_of_mnist(shape: str = "2x2", *, is_slow: bool = False) -> Run:
    # What stands behind the script are its own arguments, so ours have to stand before it.
    options = _SCALING.replace("2x2", shape)
    script = ("examples/mnist.py", f"{options} examples/mnist.py")
    return Run("--dataset digits", script, f"{shape} under horovod: efficiency", is_slow)


# On node a of the two-node cluster; `docker compose exec a` in front is left out.
ON_NODE_A = {
    "python examples/mnist.py": _MNIST,
    "horovodrun --gloo -np 4 -H a:2,b:2 python examples/mnist.py": _MNIST,
    "mpirun -np 4 -H a:2,b:2 --bind-to none python examples/mnist.py": _MNIST,
    "trainer run -np 4 -H a:2,b:2 --min-np 2 python examples/mnist.py": _MNIST,
    "trainer doctor -H a:2,b:2": Run(prints="trainer doctor: ok: "),
    "trainer test -np 4 -H a:2,b:2": Run(prints="trainer test: all right: 4 ranks on a:2,b:2, "),
    "horovodrun -np 2 python scripts/comm_bench.py --only horovod --sizes 4 64K 512K": Run(
        append="--repeats 1", prints="ranks: 2", is_slow=True
    ),
    "horovodrun -np 2 python examples/mnist.py --network tutorial --no-channels-last --batch-size 100 --lr 0.01 "
    "--momentum 0.5 --decay none --epochs 3 --output none": replace(_MNIST, is_slow=True),
    "horovodrun -np 4 -H a:2,b:2 python scripts/timed.py --steps 5 runs/t.jsonl examples/mnist.py --epochs 1": _TIMED,
    "horovodrun -np 4 -H a:2,b:2 python scripts/timed.py --steps 150 runs/t.jsonl examples/mnist.py "
    "--no-channels-last --batch-size 100 --epochs 1 --output none": replace(_TIMED, is_slow=True),
    "python scripts/scaling_test.py --hosts a:2,b:2": Run(append=f"{_SCALING} {_SCRIPT}", prints=_EFFICIENCY),
    "python scripts/scaling_test.py --hosts a:2,b:2 --strategies horovod,ddp,ring,parameter_server my_training.py "
    "--epochs 1": Run(
        append="--dataset digits --output none",
        replace=("my_training.py", f"{_SCALING} examples/mnist.py"),
        prints=_EFFICIENCY,
        is_slow=True,
    ),
    "python scripts/scaling_test.py --hosts a:2,b:2 --strategies horovod,ddp,ring,parameter_server --scaling weak "
    "--steps 150 --repeats 3 examples/mnist.py --dataset mnist --epochs 1 --output none": _scaling_of_mnist(
        is_slow=True
    ),
    "python scripts/scaling_test.py --hosts a:2,b:2 --strategies horovod,ring --scaling strong --steps 200 --repeats 2 "
    "examples/mnist.py --dataset mnist --epochs 1 --output none": _scaling_of_mnist(is_slow=True),
    "python scripts/scaling_test.py --hosts a:2,b:2 --strategies horovod,ddp,ring,parameter_server --scaling weak "
    "--batch-size 4 --global-batch --steps 60 --repeats 2 examples/language_model.py --length 128 --bytes 400000": Run(
        replace=("horovod,ddp,ring,parameter_server --scaling weak", "horovod --scaling weak --shapes 2x2"),
        append="--epochs 1",
        prints=_EFFICIENCY,
        is_slow=True,
    ),
    "python scripts/scaling_test.py --hosts localhost:2 --scaling weak --strategies horovod,ddp,ring,parameter_server "
    "--steps 80 examples/mnist.py --network large --dataset mnist --epochs 1 --output none "
    "--lr 0.001": _scaling_of_mnist("1x2", is_slow=True),
}

_ON_NODE = "--nproc-per-node 2 --master-addr a --master-port 29500 project/train.py"
# Commands that tests/docker/test_documentation.py runs on this machine, each in a test of its own.
BY_DOCKER = (
    "docker run --rm trainer:cpu python examples/mnist.py",
    "docker compose -f docker-compose.yml -f docker-compose.dev.yml up -d",
    "docker compose -f docker-compose.yml -f docker-compose.gpu.yml up --build -d",
    "DATA_DIR=/path/to/data docker compose up -d",
    "PROJECT_DIR=/path/to/project docker compose -f docker-compose.yml -f docker-compose.project.yml up --build -d",
    "CODE_DIR=/path/to/project docker compose -f docker-compose.yml -f docker-compose.dev.yml up -d",
    "horovodrun -np 4 -H a:2,b:2 python project/train.py",
    f"docker compose exec -d b torchrun --nnodes 2 --node-rank 1 {_ON_NODE}",
    f"torchrun --nnodes 2 --node-rank 0 {_ON_NODE}",
)

# Commands that something else in this project runs, with its words there.
ELSEWHERE = {
    "trainer test": ("tests/distributed/test_self_test.py", '"-m", "trainer", "test"'),
    "python benchmarks/trackers.py": ("tests/distributed/test_trackers.py", 'measure("TensorBoard", pairs=2'),
    "python -m benchmarks.busy --data-dir /path/to/data --hosts 2": (
        "tests/distributed/test_benchmarks.py",
        "def test_contestants_train_on_two_hosts",
    ),
    "python scripts/install/peers.py": (".ci/run", ".venv/bin/python scripts/install/peers.py"),
    "torchrun --nproc-per-node 2 -- train.py --log INFO": (
        "tests/distributed/test_supervise.py",
        '"torchrun", "--nproc-per-node", "2", "--", "train.py", "--log", "INFO"',
    ),
    **dict.fromkeys(
        (
            "trainer run --config job.toml",
            "trainer run --config job.toml -np 2 -H localhost:2 python train.py --epochs 1",
        ),
        ("tests/unit/test_config_file.py", "def test_the_manuals_file_is_valid"),
    ),
    "python -m tests.security.attacks elastic PORT /tmp/marker": (
        "tests/security/test_exploits.py",
        '"tests.security.attacks", "elastic"',
    ),
    "python -m tests.security.attacks function PORT /tmp/marker": (
        "tests/security/test_exploits.py",
        '@pytest.mark.parametrize("name", EXPLOITS)',
    ),
    "TRAINER_UNPROTECTED_HOROVOD=/path/to/its/site-packages python -m pytest tests/security/test_exploits.py": (
        "tests/security/test_exploits.py",
        'os.environ.get("TRAINER_UNPROTECTED_HOROVOD"',
    ),
    "make run": (".ci/run", "make run "),
    "make test": ("Makefile", ",test-fast test-jobs)"),
    "make test-fast": (".ci/run", "make test-fast\n"),
    "make test-jobs": (".ci/run", "make test-jobs"),
    "make lint": (".ci/run", "make lint\n"),
    "make docs": (".ci/run", "make docs\n"),
    "make test-docker": (".ci/run", "make test-docker "),
    "make wheels": ("Makefile", "python scripts/install/wheels.py $(ARGS)"),  # tests/distributed/test_wheels.py
    "make image": ("Makefile", "$(MAKE) --no-print-directory image\n"),
    "make image-check": ("tests/docker/test_image_contents.py", "scripts/image_check.py"),
    "make image-gpu": ("Makefile", "|| $(MAKE) image-gpu"),
    "make image-arm64": ("Makefile", "docker build --platform linux/arm64 "),
    "docker build -t trainer:cpu .": ("Makefile", "docker build -t trainer:cpu ."),
    "docker compose up --build -d": ("tests/docker/cluster.py", '"up", "--no-build", "--detach"'),
    "docker compose up -d": ("tests/docker/cluster.py", '"up", "--no-build", "--detach"'),
    "pkill horovodrun": ("tests/docker/test_bad_luck.py", 'cluster.run("a", "pkill", "horovodrun")'),
    "docker compose down -v": ("tests/docker/cluster.py", '"down", "--volumes"'),
    "python -m benchmarks.startup --data-dir /path/to/data --repeats 3": (
        "tests/distributed/test_benchmarks.py",
        'benchmark("startup"',
    ),
    "python -m benchmarks.growth": ("tests/distributed/test_benchmarks.py", '"benchmarks.growth", *options'),
    "python -m benchmarks.checkpoints --data-dir /path/to/data --repeats 3": (
        "tests/distributed/test_benchmarks.py",
        'benchmark("checkpoints"',
    ),
}
# On the two-node cluster, with more asserted than that they run.
ELSEWHERE |= {
    "horovodrun -np 2 -H a:2 python examples/mnist.py": ("tests/docker/test_shapes.py", '"1x2": (2, "a:2")'),
    "horovodrun -np 2 -H a:1,b:1 python examples/mnist.py": ("tests/docker/test_shapes.py", '"2x1": (2, "a:1,b:1")'),
    "horovodrun -np 4 -H a:2,b:2 python examples/mnist.py": ("tests/docker/test_shapes.py", '"2x2": (4, "a:2,b:2")'),
    "trainer doctor -H a:2,b:2 python train.py": (
        "tests/docker/test_doctor.py",
        '*LOOK, "python", "examples/mnist.py"',
    ),
    **dict.fromkeys(
        (
            "horovodrun -np 4 -H a:2,b:2 python scripts/comm_bench.py --json runs/comm.json --plot runs/comm.svg",
            "horovodrun -np 4 -H a:2,b:2 python scripts/comm_bench.py --max-size 64M",
        ),
        ("tests/docker/test_strategies.py", '"--json", "runs/comm.json", "--plot", "runs/comm.png"'),
    ),
}
ELSEWHERE |= {
    "horovodrun -np 4 -H a:2,b:2 python train.py": ("tests/docker/test_shapes.py", '"2x2": (4, "a:2,b:2")'),
    "trainer run -np 4 --min-np 2 -H a:2,b:2 python train.py": (
        "tests/docker/test_surviving.py",
        'supervised.start("--min-np", "2", epochs=60)',
    ),
    "trainer run --torchrun -np 2 python train.py": (
        "tests/distributed/test_supervise.py",
        '("--torchrun", "segfault"',
    ),
}
# Before and after, with the losses compared.
_COMING_FROM = "tests/distributed/test_coming_from.py"
_SCRIPTS = "examples/coming_from"
ELSEWHERE |= {
    f"horovodrun -np 2 python {_SCRIPTS}/horovod_before.py --no-shuffle": (_COMING_FROM, '"horovod": "horovodrun-mpi"'),
    f"torchrun --nproc-per-node 2 {_SCRIPTS}/ddp_before.py --no-shuffle": (_COMING_FROM, '"ddp": "torchrun"'),
    f"torchrun --nproc-per-node 2 {_SCRIPTS}/fabric_before.py --no-shuffle": (_COMING_FROM, '"fabric": "peers"'),
    f"ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 {_SCRIPTS}/accelerate_before.py --no-shuffle": (
        _COMING_FROM,
        '"accelerate": "peers"',
    ),
    f"horovodrun -np 2 python {_SCRIPTS}/horovod_after.py --no-shuffle": (_COMING_FROM, '"horovod": "horovod_after"'),
    f"torchrun --nproc-per-node 2 {_SCRIPTS}/after.py --no-shuffle": (_COMING_FROM, '"ddp": "after"'),
    f"horovodrun -np 2 python {_SCRIPTS}/lightning_horovod_after.py": (_COMING_FROM, '"lightning_horovod_after"'),
}
# The two physical machines: keys through the pipe, both nodes, and a job over the network between them.
_MACHINES = "tests/docker/test_machines.py"
_HOST = "docker compose -f docker-compose.host.yml"
_KEYS = "run --rm -T node trainer-node keys"
ELSEWHERE |= {
    r"printf 'NODE=a\nADDRESS_A=10.0.0.1\nADDRESS_B=10.0.0.2\n' > .env": (_MACHINES, '("ADDRESS_B", ADDRESS_B)'),
    f"{_HOST} {_KEYS} create a b": (_MACHINES, '"create", "a", "b"'),
    f"{_HOST} {_KEYS} export b | ssh machine-b 'cd trainer && {_HOST} {_KEYS} import'": (_MACHINES, '"export", "b"'),
    f"{_HOST} up -d": (_MACHINES, "machine.up()"),
    f"{_HOST} down -v": (_MACHINES, "machine.down()"),
    f"{_HOST} exec node horovodrun -np 4 -H a:2,b:2 python examples/mnist.py": (
        _MACHINES,
        '"-np", "4", "-H", "a:2,b:2"',
    ),
}

# Commands that no test runs, with the reason.
UNTESTED = {
    r"docker save trainer:cpu \| podman load": "needs Podman",
    "srun --mpi=list": "needs a Slurm; tests/distributed/test_srun.py runs `srun --mpi=pmix`",
    "mkdir -p runs": "is `mkdir`",
    "sbatch --nodes=2 --ntasks-per-node=2 --time=2:00:00 jobs/slurm.sbatch python train.py --checkpoint runs/saved": (
        "needs a Slurm; tests/distributed/test_srun.py"
    ),
    "qsub -pe mpi 4 -l h_rt=2:00:00 jobs/gridengine.sge python train.py --checkpoint runs/saved": (
        "needs a Grid Engine; tests/docker/test_gridengine.py"
    ),
    "kubectl create -f jobs/mpijob.yaml": "needs a Kubernetes; tests/docker/test_kubernetes.py",
    "docker build -t registry.example/trainer:1 .": "is `docker build -t trainer:cpu .` under another name",
    "docker push registry.example/trainer:1": "needs a registry",
    "make audit": "needs PyPI's advisories, which mirrors have not; tests/unit/test_images.py",
    "docker build --build-arg BASE=debian:trixie-slim -t trainer:trixie .": "needs a registry, or a base made by hand",
    "make image-oci": "needs an engine whose builder writes attestations",
    "make bases": "needs a registry; tests/unit/test_images.py",
    "BASE=debian:bookworm-slim docker compose up --build -d": "is what .ci/run does where it has no registry",
    "BASE=debian:bookworm-slim CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04 make image-gpu": "the same",
    "docker build --build-arg BASE=debian:bookworm-slim -t trainer:cpu .": "the same",
    "python benchmarks/preemptions.py --count 100": "takes most of an hour; tests/unit/test_benchmarks.py",
    "python -m benchmarks.hangs": "takes a quarter of an hour, and needs root; tests/distributed/test_hangs.py",
    "make test-docker-all": "is `make test-docker` with more of the same",
    "make test-security": "attacks 200 jobs; a part of it is in `make test`",
    "make test-all": "is `make test` with more of the same jobs",
    "make check-gpu": "needs GPUs",
    "make check-gpu ARGS=--skip-tests": "needs GPUs",
    'make bench DATA_DIR=/path/to/data ARGS="--repeats 3"': "takes minutes; tests/distributed/test_benchmarks.py",
    "make bench": "the same",
    'make bench ARGS="--repeats 3 --networks transformer --no-overhead"': "the same",
    "python benchmarks/compare.py --data-dir /path/to/data --networks tutorial --repeats 3 --only ours ddp fabric "
    "accelerate limit --no-overhead": "the same",
    "python benchmarks/compare.py --networks resnet --ranks 2 --repeats 3 --only ours ddp fabric accelerate limit "
    "--no-overhead": "the same",
    "make accuracy": "trains 20 times; tests/unit/test_benchmarks.py",
    "pip install shtab": "needs the package index",
    "shtab --shell bash trainer.cli.get_parser > ~/.local/share/bash-completion/completions/trainer": "needs shtab",
    "make clean": "would take this environment away",
    "make wheels PYTHON=python3.12": "would make the environment anew",
    "make lock": "resolves all versions anew from the package index",
    "python benchmarks/faults.py --trials 300": "takes more than an hour; tests/distributed/test_faults.py",
    "python benchmarks/chaos.py --epochs 75": "takes fifteen minutes; tests/docker/test_surviving.py",
    "python benchmarks/doctor_faults.py": "makes 56 causes in containers; tests/docker/test_doctor.py has a short form",
    "python benchmarks/doctor_faults.py --healthy 100": "the same; tests/docker/test_doctor.py does it once",
    "python benchmarks/shaped_link.py --only 1gbit 100mbit 20ms --strategies horovod,ddp,ring": (
        "an hour; slows the network down"
    ),
    "python -m benchmarks.recipes --data-dir /path/to/data --seeds 0 1 2 3 4": (
        "trains 35 times; tests/unit/test_benchmarks.py"
    ),
    "python benchmarks/updates_to.py --data-dir /path/to/data --seeds 0 1 2 3 4": (
        "trains 30 times; tests/unit/test_benchmarks.py"
    ),
    "python benchmarks/time_to.py --only 100mbit --networks mnist --seeds 0 1 2 --settings "
    "compression=powersgd:16,sync_every=4,full_updates=2 compression=powersgd:8": "twenty minutes; the next one",
    "python benchmarks/time_to.py": "two hours; slows the network down; tests/distributed/test_benchmarks.py",
    "python -m benchmarks.growth --only join --ranks 2 32 --repeats 1": "takes five minutes",
    "python benchmarks/shaped_link.py --only 100mbit 1gbit --networks mnist --strategies ddp": "a quarter of an hour",
    "python benchmarks/shaped_link.py --strategies ddp": "a quarter of an hour; slows the network down",
    "python benchmarks/shaped_link.py --networks language_model --strategies ddp,horovod": "the same",
    "horovodrun -np 4 -H a:2,b:2 python scripts/timed.py --steps 20 runs/t.jsonl examples/mnist.py "
    "--strategy ddp --network large --batch-size 100 --epochs 1 --output none --lr 0.001 --compression powersgd:8": (
        "needs a link of 100 Mbit/s, as benchmarks/shaped_link.py makes it"
    ),
}

# Names of commands in running text, which are no whole commands.
MENTIONED = (
    *(
        "docker compose exec",
        "docker build",
        "docker compose exec a",
        "docker history",
        "horovodrun --mpi",
        "horovodrun --gloo",
    ),
    *("trainer trace", "horovodrun --output-filename", "trainer run", "trainer run --torchrun", "trainer requeue"),
    *("torchrun --max-restarts 3", "horovodrun --min-np 2", "horovodrun --timeline-filename", "make fuzz"),
    *("docker run", "docker export", "pip install --force-reinstall horovod"),
    *("trainer merge", "bash jobs/tione.sh", "pip install", "pip list", "pip check"),
)

_TABLES = (LAUNCHED, UNDER_SLURM, HERE, ON_NODE_A, BY_DOCKER, ELSEWHERE, UNTESTED, MENTIONED)


def claims(unit: Unit) -> int:
    """Return how many checks a unit has."""
    if unit.kind == "command":
        return sum(unit.text in table for table in _TABLES)
    return int(unit.kind in ("python", "diff", "yaml", "toml", "text", "dockerfile"))


def claimed() -> set[str]:
    """Return every command that a check expects in the pages."""
    return {command for table in _TABLES for command in table}
