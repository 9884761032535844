"""Real programs, each node in a network namespace of its own behind one bridge: what benchmarks strike.

Needs root and `ip`. Everything it makes is named after this process and goes with `close`.
"""
import json, os, signal, subprocess, sys, time, urllib.request

LOG = "warn,skein_coordinator=info,skein_node=info,skein_node::work=trace"


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True).returncode == 0


def can_run():
    """Why it cannot run here; none if it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    name = f"sk{os.getpid()}t"
    try:
        if not ip("netns", "add", name, check=False):
            return "this system gives no network namespaces"
    except FileNotFoundError:
        return "needs the program `ip` (package iproute2)"
    ip("netns", "del", name)
    return None


class Lab:
    """A coordinator at the bridge and nodes 0, 1, .. behind it."""

    def __init__(self, binaries, folder, run, data, options, env, log=LOG):
        self.binaries, self.folder, self.run, self.data, self.options = binaries, folder, run, data, options
        self.env = {**env, "RUST_LOG": log}
        self.tag = f"sk{os.getpid()}"
        self.net = f"10.{os.getpid() % 200 + 20}.7"
        self.children, self.known = {}, set()
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.net}.1/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        self.port = 0
        self.coordinator(resume=False)

    @property
    def bridge(self):
        return f"{self.tag}b"

    def coordinator(self, resume):
        log = open(f"{self.folder}/coordinator.log", "a")
        state = f"{self.folder}/co"
        if os.path.exists(f"{state}/endpoints.json"):
            os.remove(f"{state}/endpoints.json")
        arguments = ["start", "--run", self.run, "--state", state, "--listen", f"{self.net}.1:{self.port}", *(["--resume"] if resume else [])]
        self.children["coordinator"] = subprocess.Popen([f"{self.binaries}/skein-coordinator", *arguments], env=self.env,
                                                        stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.endpoints = self.wait(lambda: read_json(f"{state}/endpoints.json"), 60, "the coordinator did not start")
        # Nodes know it by this port.
        self.port = int(self.endpoints["control"][0].split("/tcp/")[1].split("/")[0])

    def connect(self, node):
        """A network namespace for the node."""
        space, outer = f"{self.tag}n{node}", f"{self.tag}v{node}"
        self.known.add(node)
        ip("netns", "add", space)
        ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", outer, "master", self.bridge, "up")
        ip("-n", space, "addr", "add", f"{self.net}.{node + 2}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")
        # So that block_udp's rule can come first.
        ip("-n", space, "rule", "add", "pref", "100", "lookup", "local")
        ip("-n", space, "rule", "del", "pref", "0")

    def start(self, node):
        """Starts a node, or starts it again with the state it has."""
        if node not in self.known:
            self.connect(node)
        space = f"{self.tag}n{node}"
        log = open(self.log(node), "a")
        arguments = ["start", "--coordinator", self.endpoints["control"][0], "--state", f"{self.folder}/n{node}", "--data", self.data,
                     "--listen", f"{self.net}.{node + 2}:0", *self.options]
        self.children[node] = subprocess.Popen(["ip", "netns", "exec", space, f"{self.binaries}/skein-node", *arguments], env=self.env,
                                               stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def log(self, node):
        return f"{self.folder}/node{node}.log"

    def signal(self, node, number):
        self.children[node].send_signal(number)

    def kill(self, node):
        self.signal(node, signal.SIGKILL)
        self.children[node].wait()

    def cut(self, node):
        """From now on nothing passes to or from the node, and nobody is told."""
        ip("link", "set", f"{self.tag}v{node}", "nomaster")

    def mend(self, node):
        ip("link", "set", f"{self.tag}v{node}", "master", self.bridge)

    def block_udp(self, node):
        """From now on no datagram that comes to the node arrives, as behind many a firewall."""
        ip("-n", f"{self.tag}n{node}", "rule", "add", "pref", "10", "iif", "eth0", "ipproto", "udp", "blackhole")

    def allow_udp(self, node):
        ip("-n", f"{self.tag}n{node}", "rule", "del", "pref", "10")

    def status(self):
        try:
            with urllib.request.urlopen(self.endpoints["http"] + "/status", timeout=5) as answer:
                return json.load(answer)
        except OSError:
            return None

    def wait(self, found, seconds, problem):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if it := found():
                return it
            for name, child in self.children.items():
                if name == "coordinator" and child.poll() is not None:
                    raise SystemExit(f"error: the coordinator ended: {tail(f'{self.folder}/coordinator.log')}")
            time.sleep(0.05)
        raise SystemExit(f"error: {problem}: {tail(f'{self.folder}/coordinator.log')}")

    def wait_active(self, count, seconds=120):
        def settled():
            status = self.status()
            return status and status["state"] == "training" and sum(node["state"] == "active" for node in status["nodes"]) == count and status
        return self.wait(settled, seconds, f"never {count} active nodes")

    def works(self, node):
        """What a node began to compute: (when, step, microbatch, first block, end)."""
        found = []
        for line in open(self.log(node), errors="replace"):
            if " begins step=" in line:
                fields = dict(word.split("=") for word in line.split() if "=" in word)
                found.append((seconds_of(line), *(int(fields[key]) for key in ("step", "microbatch", "first", "end"))))
        return found

    def close(self):
        for child in self.children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGCONT)
                child.send_signal(signal.SIGKILL)
        for child in self.children.values():
            child.wait()
        for node in self.known:
            ip("netns", "del", f"{self.tag}n{node}", check=False)
        ip("link", "del", self.bridge, check=False)


def seconds_of(line):
    import datetime
    return datetime.datetime.fromisoformat(line.split()[0].rstrip("Z") + "+00:00").timestamp()


def read_json(path):
    try:
        return json.load(open(path))
    except (OSError, ValueError):
        return None


def tail(path, lines=5):
    try:
        return " | ".join(open(path, errors="replace").read().strip().splitlines()[-lines:])
    except OSError:
        return "no log"
