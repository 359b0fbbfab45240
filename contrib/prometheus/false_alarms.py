#!/usr/bin/env python3
"""Computes how often the surge alerts fire on Poisson noise, that is, without a cause.

    ./false_alarms.py

For each rate, the program prints the probability that one evaluation exceeds the threshold: with
the shortest usual count that the alerts accept (20 minutes), and with a full hour. Prometheus
computes an `increase` from the samples within the five minutes, and extrapolates to the whole five
minutes. With a scrape every 30 s, the samples cover at least 270 s of the 300 s. The count and the
usual count are independent, because the usual count ends five minutes before the count begins.
"""

import math

COVERED = 270 / 300
RATES = [2, 5, 10, 20, 30, 40, 50, 60, 62, 70, 80, 82, 90, 100, 150, 200]  # requests in 5 minutes
EVALUATIONS = 365 * 24 * 60 * 2 * 1000  # in a year, of 1,000 rules
NEGLIGIBLE = 1e-45


def probabilities(mean):
    """Returns the Poisson distribution up to where it is negligible."""
    count = range(int(mean + 20 * math.sqrt(mean) + 60))
    return [math.exp(one * math.log(mean) - mean - math.lgamma(one + 1)) for one in count]


def add(one, other, weight):
    """Returns the distribution of the sum of `one` and `weight` times `other`."""
    total = [0.0] * (len(one) + (len(other) - 1) * weight)
    for at, left in enumerate(one):
        if left > NEGLIGIBLE:
            for count, right in enumerate(other):
                total[at + count * weight] += left * right
    return total


def usual_counts(per_minute, weights, unit):
    """Returns the values of the usual count and their probabilities. `weights` contains pairs of a
    number of minutes and the weight that requests in these minutes have in the usual count, in
    units of 1 / `unit`."""
    distribution = [1.0]
    for minutes, weight in weights:
        distribution = add(distribution, probabilities(per_minute * minutes), weight)
    return [(at / unit, one) for at, one in enumerate(distribution) if one > NEGLIGIBLE]


def exceeds(rate, usual):
    """Returns the probability that a count exceeds the threshold."""
    counts = probabilities(rate * COVERED)
    counts += [0.0] * 10_000
    above = [0.0] * (len(counts) + 1)  # the probability of more than `at` requests is above[at + 1]
    for at in range(len(counts) - 1, -1, -1):
        above[at] = above[at + 1] + counts[at]
    total = 0.0
    for value, probability in usual:
        threshold = max(3 * value, value + 8 * math.sqrt(value) + 50)
        total += probability * above[min(math.floor(threshold * COVERED) + 1, len(counts))]
    return total


def main():
    # The usual count is the average of five-minute counts, so a request is included for up to five
    # minutes. Requests near the ends of the period are included for a shorter time.
    end = [(1, weight) for weight in (9, 7, 5, 3, 1)]
    # In the first five minutes of a series, the counts cover less than five minutes.
    short, hour = [(15, 10), *end], [(55, 10), *end, *end]
    print("denials in 5 min   20 minutes   an hour")
    worst = [0.0, 0.0]
    for rate in RATES:
        row = [exceeds(rate, usual_counts(rate / 5, weights, unit))
               for weights, unit in ((short, 40), (hour, 120))]
        worst = [max(pair) for pair in zip(worst, row)]
        print(f"{rate:16}   {row[0]:10.1e}   {row[1]:7.1e}")
    print(f"at most            {worst[0]:10.1e}   {worst[1]:7.1e}")
    print(f"1,000 rules, an evaluation every 30 s: at most one false alarm in"
          f" {1 / (worst[0] * EVALUATIONS):.0e} years")


main()
