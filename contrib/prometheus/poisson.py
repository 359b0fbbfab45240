#!/usr/bin/env python3
"""Writes tests-surge.yaml: the unit tests of the surge alerts, on Poisson noise with a fixed seed.

    ./poisson.py           writes the file
    ./poisson.py --check   exits with 1 if the file differs from this program's output
"""

import os
import random
import sys
import textwrap

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests-surge.yaml")
SEED = 20261124
STEP = 15  # seconds between two samples, as in prometheus.yaml
WARM_UP = 75  # minutes until an alert has a full hour of usual counts
# Denials per second by rule. `worst` is where false alarms are most probable: 80 in five minutes.
DENIALS = {"rare": 0.02, "worst": 80 / 300, "usual": 3, "busy": 40}
ALLOWED = 60  # requests per second

HEAD = """\
# Unit tests of the surge alerts on Poisson noise. Written by poisson.py; do not edit.
#   promtool test rules tests.yaml tests-surge.yaml
rule_files:
  - tidegate.rules.yaml
evaluation_interval: 30s

tests:
"""


def poisson(draw, mean):
    """Returns a random number with a Poisson distribution, by adding gaps between arrivals."""
    count, at = 0, draw.expovariate(1)
    while at < mean:
        count, at = count + 1, at + draw.expovariate(1)
    return count


def counter(draw, rate, minutes, factor):
    """Returns the samples of a counter. `factor(minute)` multiplies the rate."""
    total, samples = 0, [0]
    for step in range(minutes * 60 // STEP):
        total += poisson(draw, rate * STEP * factor(step * STEP / 60))
        samples.append(total)
    return samples


def series(name, labels, samples):
    labels = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    values = textwrap.fill(" ".join(map(str, samples)), 100, initial_indent=" " * 10,
                           subsequent_indent=" " * 10)
    return f"      - series: '{name}{{{labels}}}'\n        values: >-\n{values}\n"


def traffic(seed, minutes, factor):
    """Returns the series of a server. `factor(rule, minute)` multiplies a rule's denial rate. For
    the rule None, it multiplies the rate of allowed requests."""
    draw = random.Random(seed)
    target = {"job": "tidegate", "instance": "a:8082"}
    text = series("up", target, [f"1x{minutes * 60 // STEP}"])
    denied = [0] * (minutes * 60 // STEP + 1)
    for rule, rate in DENIALS.items():
        samples = counter(draw, rate, minutes, lambda minute: factor(rule, minute))
        denied = [one + other for one, other in zip(denied, samples)]
        labels = target | {"rule": rule, "outcome": "limit"}
        text += series("tidegate_rule_decisions_total", labels, samples)
    allowed = counter(draw, ALLOWED, minutes, lambda minute: factor(None, minute))
    for outcome, samples in (("limit", denied), ("allowed", allowed)):
        labels = target | {"listener": "http", "outcome": outcome}
        text += series("tidegate_decisions_total", labels, samples)
    return text


def test(name, input_series, checks):
    return f"  - name: {name}\n    interval: {STEP}s\n    input_series:\n{input_series}" \
           f"    promql_expr_test:\n{checks}\n"


def silent(query, minute):
    return f"      - {{expr: '{query}', eval_time: {minute}m, exp_samples: []}}\n"


def firing(alert, minute, severity, labels=""):
    query = f'ALERTS{{alertname="{alert}", alertstate="firing"'
    sample = f'{query}, severity="{severity}", job="tidegate"{labels}}}'
    return f"      - expr: '{query}}}'\n        eval_time: {minute}m\n" \
           f"        exp_samples: [{{labels: '{sample}', value: 1}}]\n"


def tests():
    end = WARM_UP + 60
    yield test(
        "one hour of Poisson noise is not a surge",
        traffic(SEED, end, lambda rule, minute: 1),
        silent(f"count_over_time(ALERTS[{end}m])", end)
        # The usual counts exist, so the alerts were able to fire.
        + f"      - {{expr: 'count(job_rule:tidegate_denials:usual5m)', eval_time: {end}m, "
          f"exp_samples: [{{value: {len(DENIALS)}}}]}}\n"
        + f"      - {{expr: 'count(job_rule:tidegate_denials:increase5m offset 30m)', "
          f"eval_time: {end}m, exp_samples: [{{value: {len(DENIALS)}}}]}}\n",
    )
    start, stop = WARM_UP, WARM_UP + 10
    yield test(
        "the denials of one rule rise fivefold for ten minutes",
        traffic(SEED + 1, stop + 15,
                lambda rule, minute: 5 if rule == "worst" and start <= minute < stop else 1),
        silent(f"count_over_time(ALERTS[{start}m])", start)
        + firing("TidegateRuleDenialsSurge", start + 6, "warning", ', rule="worst"')
        + firing("TidegateRuleDenialsSurge", stop, "warning", ', rule="worst"')
        # The denials of all rules rise by less than 3 %.
        + silent('count_over_time(ALERTS{alertname!="TidegateRuleDenialsSurge"}[20m])', stop + 6)
        + silent("ALERTS", stop + 6),
    )
    yield test(
        "all traffic rises fivefold",
        traffic(SEED + 2, stop, lambda rule, minute: 5 if minute >= start else 1),
        silent(f"count_over_time(ALERTS[{start}m])", start)
        + firing("TidegateDenialsSurge", start + 6, "warning")
        + firing("TidegateRequestsSurge", start + 6, "info"),
    )
    yield test(
        "half an hour of traffic is too short for a usual count",
        traffic(SEED + 3, 29, lambda rule, minute: 10 if minute >= 20 else 1),
        silent("count_over_time(ALERTS[29m])", 29),
    )


def main():
    text = HEAD + "".join(tests()).rstrip("\n") + "\n"
    if sys.argv[1:] == ["--check"]:
        with open(FILE) as file:
            if file.read() != text:
                sys.exit(f"{FILE} is out of date: run {sys.argv[0]}")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        with open(FILE, "w") as file:
            file.write(text)


main()
