"""``mpidist simulate``: what an all-reduce would take on a machine that is not at hand, and which algorithm is best."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpidist.cluster.hostlist import expand_hostlist
from mpidist.cluster.topology import Topology
from mpidist.commands import quantities
from mpidist.commands.parser import Parser
from mpidist.commands.quantities import show_bytes, show_level, show_seconds
from mpidist.schedules.comparison import Outcome, candidates, compare
from mpidist.schedules.cost import CostModel, Level
from mpidist.schedules.networks import NETWORKS, network
from mpidist.schedules.rounds import COLLECTIVES, Schedule
from mpidist.tuning.store import Record, folder, path_of, read, stored

#: More ranks are not simulated: memory and time grow with them, and names of algorithms do not change any more.
_MOST_RANKS = 1_000_000

_EXAMPLES = """examples:
  mpidist simulate --nodes 1024 --ranks-per-node 8 --network infiniband-hdr --bytes 100MB
  mpidist simulate --hosts 'n[1-4]:8,big:16' --alpha-inter 2us --beta-inter 25GB/s --bytes 1MB
  mpidist simulate --networks
  mpidist run -n 2 -m mpidist simulate --measure
"""


def main(argv: Sequence[str]) -> int:
    """Print the table and return the exit status; Local, but with ``--measure``, where all ranks call it."""
    options = parser().parse_args(argv)
    if options.networks:
        print(networks_page())
        return 0
    if options.measure:
        from mpidist.commands.simulate_measure import measure

        return measure(options.json, options.bytes)
    try:
        topology, model = _topology(options), _model(options)
        schedules = _schedules(options, topology)
    except ValueError as error:
        parser().error(str(error))
    outcomes = compare(options.bytes, model, topology, schedules, options.jitter, options.seed)
    print((_as_json if options.json else _page)(options, topology, model, outcomes))
    return 0


def parser() -> Parser:
    """Return the parser of ``mpidist simulate``'s arguments."""
    what = "Play the schedules of a collective with a clock for every rank, on links with the given figures."
    parser = Parser("simulate", what, _EXAMPLES)
    add = parser.add_argument
    add("--networks", action="store_true", help="list the networks whose figures are known, with their sources")
    add("--measure", action="store_true", help="under mpidist run: calibrate, predict, and measure on these ranks")
    add("--json", action="store_true", help="print JSON")
    job = parser.add_argument_group("the job")
    job.add_argument("--nodes", type=quantities.count, default=2, help="nodes (2)")
    job.add_argument("--ranks-per-node", type=quantities.count, default=8, help="ranks on each node (8)")
    job.add_argument("--hosts", help="in place of these: hosts with their ranks, such as n[1-4]:8,big:16")
    job.add_argument("--placement", choices=("block", "cyclic"), default="block", help="how ranks are dealt to nodes")
    job.add_argument("--bytes", type=quantities.nbytes, default=100_000_000, help="the buffer (100MB)")
    job.add_argument("--collective", choices=COLLECTIVES, default="all_reduce", help="which one (all_reduce)")
    job.add_argument("--algorithm", action="append", help="only this one; may be given several times")
    _add_links(parser.add_argument_group("the links"))
    noise = parser.add_argument_group("noise")
    noise.add_argument("--jitter", type=_spread, help="spread of the log-normal factor of each rank's rounds")
    noise.add_argument("--seed", type=_seed, default=0, help="of the jitter")
    return parser


def _add_links(group: Any) -> None:
    group.add_argument("--network", default="infiniband-hdr", help="between nodes (infiniband-hdr)")
    group.add_argument("--network-intra", default="pcie-4", help="inside a node (pcie-4)")
    for level, where in (("intra", "inside a node"), ("inter", "between nodes")):
        group.add_argument(f"--alpha-{level}", type=quantities.seconds, help=f"seconds a message {where}: 2us")
        group.add_argument(
            f"--beta-{level}", type=quantities.seconds_per_byte, help=f"seconds a byte {where}, or a rate: 25GB/s"
        )
    gamma = "seconds a byte reduced, or a rate (0: reducing is free)"
    group.add_argument("--gamma", type=quantities.seconds_per_byte, default=0.0, help=gamma)
    links = "links of a node, which its messages share (1)"
    group.add_argument("--links-per-node", type=quantities.count, default=1, help=links)
    stored = "in place of all these: a file of mpidist tune, or the only one in its folder"
    group.add_argument("--figures", metavar="FILE", nargs="?", const="", help=stored)


def _spread(text: str) -> float:
    try:
        spread = float(text)
    except ValueError:
        spread = -1.0
    if not 0 <= spread <= 10:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 to 10, such as 0.2")
    return spread


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 0 or more")
    return int(text)


# -- what is simulated -------------------------------------------------------------------------------------------------


def _topology(options: argparse.Namespace) -> Topology:
    if options.hosts:
        counted = list(_counted_hosts(options.hosts))
        _check_size(sum(count for _, count in counted))
    else:
        _check_size(options.nodes * options.ranks_per_node)
        counted = [(f"node{node}", options.ranks_per_node) for node in range(options.nodes)]
    return Topology(placed(counted, options.placement))


def _check_size(ranks: int) -> None:
    if ranks > _MOST_RANKS:
        raise ValueError(f"{ranks} ranks are more than the {_MOST_RANKS} that are simulated")


def _counted_hosts(text: str) -> Iterator[tuple[str, int]]:
    """Yield each host of ``n[1-4]:8,big`` with its number of ranks, 1 where none is said."""
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+|\[.*", text):
        hosts, _, count = part.partition(":")
        if count and (not count.isdecimal() or int(count) < 1):
            raise ValueError(f"--hosts {text!r}: expected a number of ranks after the colon, got {part!r}")
        for host in expand_hostlist(hosts):
            yield host, int(count or 1)


def placed(counted: Sequence[tuple[str, int]], placement: str) -> list[str]:
    """Return the host of every rank: host after host, or one rank each in turn while a host has places left (Local)."""
    if placement == "block":
        return [host for host, count in counted for _ in range(count)]
    most = max((count for _, count in counted), default=0)
    return [host for turn in range(most) for host, count in counted if turn < count]


def _model(options: argparse.Namespace) -> CostModel:
    if options.figures is not None:
        return _stored(options.figures).figures.model
    intra, inter = _level(options, "intra", options.network_intra), _level(options, "inter", options.network)
    return CostModel(intra, inter, options.links_per_node)


def _stored(path: str) -> Record:
    """Return what `mpidist tune` has stored in a file, or in the only file of its folder."""
    if path:
        try:
            return read(Path(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"--figures {path}: {error}") from None
    where = folder()
    records, problems = stored(where)
    if len(records) == 1:
        return records[0]
    known = [f"{path_of(record.key, where)}: {record.key.get('ranks')}" for record in records]
    text = f"--figures: {where} holds the figures of {len(records)} sets of ranks; name one"
    raise ValueError("\n  ".join([text, *known, *problems]))


def _level(options: argparse.Namespace, level: str, name: str) -> Level:
    alpha, beta = getattr(options, f"alpha_{level}"), getattr(options, f"beta_{level}")
    try:
        return network(name).level(alpha, beta, options.gamma)
    except ValueError as error:
        cure = f": --alpha-{level} 2us, for example" if name in NETWORKS else ""
        raise ValueError(f"{error}{cure}") from None


def _schedules(options: argparse.Namespace, topology: Topology) -> list[Schedule]:
    """Return the schedules that were asked for, of all there are for these ranks."""
    schedules = candidates(options.collective, topology)
    asked = options.algorithm or [schedule.name for schedule in schedules]
    unknown = sorted(set(asked) - {schedule.name for schedule in schedules})
    if unknown:
        known = ", ".join(schedule.name for schedule in schedules)
        raise ValueError(f"no {options.collective} is called {', '.join(unknown)} on these ranks; known ones: {known}")
    return [schedule for schedule in schedules if schedule.name in asked]


# -- what is printed ---------------------------------------------------------------------------------------------------


def networks_page() -> str:
    """Return the table of networks with their figures and sources."""
    rows = [["network", "latency", "one direction", "source"]]
    for each in NETWORKS.values():
        latency = "none published" if each.alpha is None else show_seconds(each.alpha)
        rows.append([each.name, latency, f"{show_bytes(each.bytes_per_second)}/s", each.source])
    return quantities.table(rows, left=(0, 3))


def _page(options: argparse.Namespace, topology: Topology, model: CostModel, outcomes: Sequence[Outcome]) -> str:
    title = f"{options.collective} of {show_bytes(options.bytes)} on {topology.describe()}, {topology.size} in all"
    lines = [title, *_links(options, model), "", outcome_table(outcomes)]
    played = [outcome for outcome in outcomes if outcome.extrapolated_rounds]
    if played:
        lines.append(f"{', '.join(outcome.algorithm for outcome in played)}: most rounds continue at the mean pace")
    return "\n".join(lines)


def _links(options: argparse.Namespace, model: CostModel) -> list[str]:
    links = "as many links as ranks" if model.links_per_node is None else f"links: {model.links_per_node}"
    gamma = model.inter.gamma or model.intra.gamma
    return [
        f"inside    {_named(options, 'intra', options.network_intra)}: {show_level(model.intra)}",
        f"between   {_named(options, 'inter', options.network)}: {show_level(model.inter)}, {links}",
        f"reducing  {f'{show_bytes(1 / gamma)}/s' if gamma else 'not counted; --gamma says what it takes'}",
    ]


def _named(options: argparse.Namespace, level: str, name: str) -> str:
    """Return where the figures of a level are from."""
    if options.figures is not None:
        return "as stored"
    given = [getattr(options, f"{figure}_{level}") is not None for figure in ("alpha", "beta")]
    return "as given" if all(given) else f"{name}, partly as given" if any(given) else name


def outcome_table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes, the fastest first, as a table that marks it and says how much longer the others take."""
    rows = [["algorithm", "rounds", "time", "sent by a rank", "over a node's link", ""]]
    least = outcomes[0].seconds
    for outcome in outcomes:
        amounts = [show_bytes(outcome.bytes_per_rank), show_bytes(outcome.bytes_per_link)]
        mark = f"{outcome.seconds / least:.2f}x" if outcome.seconds > least > 0 else "best"
        rows.append([outcome.algorithm, str(outcome.rounds), show_seconds(outcome.seconds), *amounts, mark])
    return quantities.table(rows)


def _as_json(options: argparse.Namespace, topology: Topology, model: CostModel, outcomes: Sequence[Outcome]) -> str:
    job = {"collective": options.collective, "bytes": options.bytes, "ranks": topology.size}
    job |= {"nodes": topology.node_count, "topology": topology.describe(), "model": asdict(model)}
    found = {"best": outcomes[0].algorithm, "outcomes": [asdict(outcome) for outcome in outcomes]}
    return json.dumps(job | found, indent=2)
