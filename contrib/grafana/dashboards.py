#!/usr/bin/env python3
"""Writes the dashboards tidegate-operators.json and tidegate-fleet.json. Edit the panels here.

    ./dashboards.py           writes the files
    ./dashboards.py --check   exits with 1 if a file differs from this program's output
"""

import json
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
DOCS = "https://github.com/tidegate/tidegate/blob/main/docs"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
HEIGHT = 8  # of a graph, in units of Grafana's grid, which is 24 units wide

# Label matchers. The variables are at the top of a dashboard.
SERVER = 'job=~"$job",instance=~"$instance"'
RULE = f'{SERVER},rule=~"$rule"'
JOB = 'job=~"$job"'
JOB_RULE = f'{JOB},rule=~"$rule"'
FIRING = f'ALERTS{{alertname=~"Tidegate.+",alertstate="firing",{JOB}}}'

GREEN_ABOVE_ZERO = [("red", None), ("green", 1)]
RED_ABOVE_ZERO = [("green", None), ("red", 1)]


def rate(metric, labels=SERVER):
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def rate_by(by, metric, labels=SERVER):
    return f"sum by ({by}) ({rate(metric, labels)})"


def share(part, whole):
    """Returns a query for a ratio, which has no value where `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def quantile(number, metric, labels=SERVER, by=""):
    labelled = f"{by}, le" if by else "le"
    return f"histogram_quantile({number}, {rate_by(labelled, metric + '_bucket', labels)})"


def targets(queries, **fields):
    return [
        {"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": query,
         "legendFormat": legend, **fields}
        for number, (query, legend) in enumerate(queries)
    ]


def panel(kind, title, description, queries, width, height, unit, options=None, custom=None,
          thresholds=None, target=None, **fields):
    defaults = {"unit": unit, "min": 0, "custom": custom or {}}
    if thresholds:
        steps = [{"color": color, "value": value} for color, value in thresholds]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        "type": kind, "title": title, "description": description, "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options or {}, "targets": targets(queries, **(target or {})), **fields,
    }


def graph(title, description, unit, *queries, width=12, stacked=False):
    custom = {"lineWidth": 1, "fillOpacity": 30 if stacked else 0, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    options = {
        "legend": {"displayMode": "table", "placement": "right", "calcs": ["mean", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel("timeseries", title, description, queries, width, HEIGHT, unit, options, custom)


def stat(title, description, unit, *queries, thresholds=None, width=4):
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value" if thresholds else "none", "graphMode": "area",
    }
    return panel("stat", title, description, queries, width, 4, unit, options,
                 thresholds=thresholds)


def heatmap(title, description, unit, query, width=12):
    options = {
        "calculate": False, "yAxis": {"unit": unit}, "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
        "tooltip": {"mode": "single", "yHistogram": True}, "legend": {"show": True},
    }
    return panel("heatmap", title, description, [(query, "{{le}}")], width, HEIGHT, "short",
                 options, target={"format": "heatmap"})


def table(title, description, columns, hidden=(), width=24):
    """A table of the current values. `columns` contains queries with their names and units. The
    rows are joined by their labels."""
    # Grafana's names for the value columns.
    values = ["Value"] if len(columns) == 1 else [f"Value #{one}" for one in "ABCDEFGH"]
    names = {value: name for value, (_, name, _) in zip(values, columns)}
    shown = panel("table", title, description, [(query, "") for query, _, _ in columns], width,
                  HEIGHT, "short", {"cellHeight": "sm"},
                  target={"format": "table", "instant": True})
    shown["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": name},
         "properties": [{"id": "unit", "value": unit}]}
        for _, name, unit in columns
    ]
    excluded = {name: True for name in ("Time", *hidden)}
    shown["transformations"] = [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": excluded, "renameByName": names}},
    ]
    return shown


def operators():
    decisions = rate("tidegate_decisions_total")
    denials = rate("tidegate_decisions_total", SERVER + ',outcome!="allowed"')
    of_rule = rate_by("rule", "tidegate_rule_decisions_total", RULE)
    denied_by_rule = rate_by("rule", "tidegate_rule_decisions_total", RULE + ',outcome!="allowed"')
    usual = f"job:tidegate_denials:usual5m{{{JOB}}}"
    utilization = "tidegate_rule_utilization_ratio"
    within = rate_by("rule", utilization + "_bucket", RULE + ',le="0.8"')
    measured = rate_by("rule", utilization + "_count", RULE)
    return [
        ("Now", [
            stat("Decisions per second", "All decisions of the selected servers, without peeks.",
                 "reqps", (f"sum({decisions})", "")),
            stat("Denied", "The share of the decisions that were denials.", "percentunit",
                 (share(f"sum({denials})", f"sum({decisions})"), "")),
            stat("Would be denied", "Requests per second that a rule in shadow mode would have "
                 "denied. Each such request was admitted.", "reqps",
                 (f"sum({rate('tidegate_rule_shadow_denials_total', RULE)})", "")),
            stat("Alerts", "Alerts of Tidegate that are firing. The list is on the page Alerts of "
                 "Prometheus or in Alertmanager.", "short",
                 (f"count({FIRING}) or vector(0)", ""), thresholds=RED_ABOVE_ZERO),
            stat("Servers with a rejected rules file", "Servers whose last reload failed. Their "
                 "active rules are not those of the file. `tidegate reload` lists the errors.",
                 "short", (f"count(tidegate_last_reload_success{{{SERVER}}} == 0) or vector(0)", ""),
                 thresholds=RED_ABOVE_ZERO),
            stat("Blocks", "Keys that operators have blocked. `tidegate blocks` lists them.", "short",
                 (f"max(tidegate_blocks{{{SERVER}}})", "")),
        ]),
        ("What is limited, and by which rule", [
            graph("Decisions by outcome", "`limit`: a limit was exceeded. `blocked`: an operator "
                  "has blocked the key. `store`: the store was full, or Redis failed and the rule "
                  "denies in this case.", "reqps",
                  (rate_by("outcome", "tidegate_decisions_total"), "{{outcome}}"), stacked=True),
            graph("Decisions by listener", "The listeners that received the requests.", "reqps",
                  (rate_by("listener", "tidegate_decisions_total"), "{{listener}}"), stacked=True),
            graph("Denials by rule", "Denied requests by the rule that decided. The 20 rules with "
                  "the most denials. `tidegate denials --rule RULE` shows the keys.", "reqps",
                  (f"topk(20, {denied_by_rule})", "{{rule}}")),
            graph("Denied share by rule", "The share of a rule's decisions that were denials. If "
                  "several rules apply to an admitted request, the rule with the fewest remaining "
                  "units has made the decision.",
                  "percentunit", (f"topk(20, {share(denied_by_rule, of_rule)})", "{{rule}}")),
            graph("Denials compared with the usual number", "Denials of all rules in five minutes, "
                  "beside the average of the hour before and the threshold of the alert "
                  "TidegateDenialsSurge. All servers of the job together. Needs the recording "
                  "rules of contrib/prometheus.", "short",
                  (f"job:tidegate_denials:increase5m{{{JOB}}}", "{{job}}: denials in 5 minutes"),
                  (usual, "{{job}}: usual"),
                  (f"(3 * {usual} > {usual} + 8 * sqrt({usual}) + 50)"
                   f" or ({usual} + 8 * sqrt({usual}) + 50)", "{{job}}: threshold of the alert")),
            graph("Denials of a rule, as a multiple of the usual number", "1 means as many denials "
                  "as usual in the hour before. The alert TidegateRuleDenialsSurge needs more than "
                  "3, and at least 50 more than usual. The 20 highest. Needs the recording rules "
                  "of contrib/prometheus.", "short",
                  (f"topk(20, job_rule:tidegate_denials:increase5m{{{JOB_RULE}}}"
                   f" / (job_rule:tidegate_denials:usual5m{{{JOB_RULE}}} > 0))", "{{rule}}")),
            graph("Denied cost by rule", "The cost of denied requests per second. Equal to the "
                  "number of denials if every request costs 1.", "short",
                  (f"topk(20, {rate_by('rule', 'tidegate_rule_denied_cost_total', RULE)})",
                   "{{rule}}")),
            graph("Admitted over the limit", "Requests admitted within the soft allowance of a "
                  "rule (`soft`). Without the allowance they would be denied.", "reqps",
                  (f"topk(20, {rate_by('rule', 'tidegate_rule_soft_admissions_total', RULE)})",
                   "{{rule}}")),
            table("Rules", "Each rule with its present numbers. Utilization is measured for one "
                  "decision in 64.", [
                      (of_rule, "Decisions per second", "reqps"),
                      (denied_by_rule, "Denials per second", "reqps"),
                      (share(denied_by_rule, of_rule), "Denied", "percentunit"),
                      (rate_by("rule", "tidegate_rule_shadow_denials_total", RULE),
                       "Would be denied per second", "reqps"),
                      (quantile(0.9, utilization, RULE, "rule"), "Utilization, 90 % of the decisions",
                       "percentunit"),
                  ], width=14),
            table("Limits", "The active limits: the number of units that an idle key can spend "
                  "at once.", [(f"max by (rule, policy) (tidegate_limit{{{RULE}}})", "Limit", "short")],
                  width=10),
        ]),
        ("Shadow rules and candidate rules", [
            graph("Would be denied by shadow rules", "Requests that a rule in shadow mode would "
                  "have denied. Check this number before you enforce the rule.", "reqps",
                  (f"topk(20, {rate_by('rule', 'tidegate_rule_shadow_denials_total', RULE)})",
                   "{{rule}}")),
            graph("Changed by candidate rules", "How candidate rules would have decided otherwise. "
                  "Empty without `candidate` in the rules file.", "reqps",
                  (rate_by("change", "tidegate_candidate_requests_total",
                           SERVER + ',change!="none"'), "{{change}}")),
        ]),
        ("Utilization", [
            graph("Utilization by rule", "How much of its limit the key of a request had used "
                  "after the decision: for 90 % of the decisions, at most this much. 100 % means "
                  "that nothing was left.", "percentunit",
                  (f"topk(20, {quantile(0.9, utilization, RULE, 'rule')})", "{{rule}}")),
            graph("Decisions near the limit", "The share of decisions whose key had used more than "
                  "80 % of its limit. If this share grows, denials follow.", "percentunit",
                  (f"topk(20, 1 - {share(within, measured)})", "{{rule}}")),
            heatmap("Distribution of the utilization", "How many decisions found how much of the "
                    "limit used, of the selected rules. One decision in 64 is measured.",
                    "percentunit",
                    f"sum by (le) (increase({utilization}_bucket{{{RULE}}}[$__rate_interval]))",
                    width=24),
        ]),
        ("Latency", [
            graph("Latency of decisions", "The time of a decision inside Tidegate, with Redis if "
                  "it is used. One decision in 64 is measured.", "s",
                  *((quantile(number, "tidegate_decision_duration_seconds"), name)
                    for number, name in ((0.5, "median"), (0.9, "90 %"), (0.99, "99 %")))),
            graph("Latency by rule", "99 % of the measured decisions about requests to which the rule "
                  "applied took at most this long. The 20 slowest rules.", "s",
                  (f"topk(20, {quantile(0.99, 'tidegate_rule_decision_duration_seconds', RULE, 'rule')})",
                   "{{rule}}")),
        ]),
        ("Requests without a rule, and invalid requests", [
            graph("Requests to which no rule applies", "These requests are admitted without a "
                  "limit. A sudden rise can mean that a condition or an entry is wrong.", "reqps",
                  (rate_by("listener", "tidegate_unmatched_requests_total"), "{{listener}}"), width=8),
            graph("Invalid requests", "Requests with invalid fields, unknown commands or a broken "
                  "protocol.", "reqps",
                  (rate_by("listener", "tidegate_bad_requests_total"), "{{listener}}"), width=8),
            graph("Entries that do not fit", "`unknown`: entries of requests that no rule uses, "
                  "per second, possibly misspelt. `missing`: key entries of rules that no request "
                  "has contained; the log names them.", "short",
                  (f"sum({rate('tidegate_unknown_entries_total')})", "unknown"),
                  (f"max(tidegate_missing_key_entries{{{SERVER}}})", "missing"), width=8),
        ]),
        ("Events", [
            graph("Events by type", "Events per second: a key begins to be denied, traffic surges, "
                  "an operator blocks a key. `tidegate events` lists them.", "short",
                  (rate_by("type", "tidegate_events_total"), "{{type}}"), width=8),
            graph("Lost events", "`file`: the disk is full or too slow. `webhook`: the receiver "
                  "did not accept them. `rate`: more than `max_per_second` keys had events.", "short",
                  (rate_by("reason", "tidegate_events_lost_total"), "{{reason}}"), width=8),
            graph("Webhooks", "Events that webhooks accepted, and failed attempts to deliver.",
                  "short", (f"sum({rate('tidegate_webhook_events_total')})", "accepted events"),
                  (f"sum({rate('tidegate_webhook_failed_attempts_total')})", "failed attempts"),
                  width=8),
        ]),
    ]


def fleet():
    decisions = rate_by("instance", "tidegate_decisions_total")
    denials = rate_by("instance", "tidegate_decisions_total", SERVER + ',outcome!="allowed"')
    sources = "tidegate_decisions_by_source_total"
    exact = rate(sources, SERVER + ',source=~"redis|cache"')
    cached = rate(sources, SERVER + ',source="cache"')
    every_source = f"sum({rate(sources)})"
    by_redis = rate_by("instance", sources, SERVER + ',source="redis"')
    batches = rate_by("instance", "tidegate_redis_batches_total")
    inexact = f'{SERVER},source=~"local|policy"'
    return [
        ("Now", [
            stat("Servers that answer", "Servers whose metrics Prometheus can read, and all "
                 "servers that it knows.", "short", (f"sum(up{{{JOB}}})", "answer"),
                 (f"count(up{{{JOB}}})", "known")),
            stat("Servers counted in Redis", "Servers on this Redis, as last counted by a server. "
                 "0 if `fallback_share` is a percentage.", "short",
                 (f"max(tidegate_fleet_servers{{{SERVER}}})", "")),
            stat("Redis servers in use", "The fewest that a server uses, and the number that it "
                 "knows.", "short", (f"min(tidegate_redis_servers_up{{{SERVER}}})", "in use"),
                 (f"max(tidegate_redis_servers{{{SERVER}}})", "known"),
                 thresholds=GREEN_ABOVE_ZERO),
            stat("Exact decisions", "The share of decisions that Redis or the denial cache made. "
                 "The others were made by the local share or by `open` or `closed`.", "percentunit",
                 (share(f"sum({exact})", every_source), ""), thresholds=[("red", None), ("green", 0.999)]),
            stat("Cluster slots without a node", "Slots of Redis Cluster without a deciding node. "
                 "Always 0 without a cluster.", "short",
                 (f"max(tidegate_redis_slots_unserved{{{SERVER}}})", ""), thresholds=RED_ABOVE_ZERO),
            stat("Alerts", "Alerts of Tidegate that are firing. The list is on the page Alerts of "
                 "Prometheus or in Alertmanager.", "short",
                 (f"count({FIRING}) or vector(0)", ""), thresholds=RED_ABOVE_ZERO),
        ]),
        ("Redis, and the source of decisions", [
            graph("Decisions by source", "`redis`: exact. `cache`: a denial of Redis that is still "
                  "valid, exact. `local`: the local share, while Redis does not answer. `policy`: "
                  "`on_failure` is `open` or `closed`.", "reqps",
                  (rate_by("source", sources), "{{source}}"), stacked=True),
            graph("Decisions without Redis, by server", "Decisions by the local share or by the "
                  "policy, averaged over five minutes. Only some servers: look at their network. "
                  "All servers: look at Redis. Needs the recording rules of contrib/prometheus.",
                  "reqps",
                  (f"sum by (instance) (job_instance_source:tidegate_decisions:rate5m{{{inexact}}})",
                   "{{instance}}")),
            graph("Failed Redis requests", "`unavailable`: not sent, because Redis was known to be "
                  "down. `not_executed`: not sent for another reason. `unknown`: not answered in "
                  "time. `refused`: Redis returned an error, such as a full memory.", "reqps",
                  (rate_by("failure", "tidegate_redis_failures_total"), "{{failure}}")),
            graph("Circuit breaker openings", "How often a server stopped using a Redis server "
                  "that failed. It tries again within a second.", "short",
                  (f"sum by (instance) (increase(tidegate_redis_circuit_opens_total{{{SERVER}}}"
                   "[$__rate_interval]))", "{{instance}}")),
            graph("Decisions per batch", "Decisions that one batch of commands to Redis contains. "
                  "The busier a server is, the more it sends together.", "short",
                  (share(by_redis, batches), "{{instance}}"), width=8),
            graph("Batches per second", "Batches of commands to Redis.", "reqps",
                  (batches, "{{instance}}"), width=8),
            graph("Denials from the cache", "The share of decisions that the denial cache made "
                  "without asking Redis.", "percentunit", (share(f"sum({cached})", every_source), "cache"),
                  width=8),
        ]),
        ("Servers", [
            graph("Decisions by server", "Uneven numbers mean that the load is not spread evenly.",
                  "reqps", (decisions, "{{instance}}")),
            graph("Denied share by server", "The share of a server's decisions that were denials. "
                  "With Redis, all servers apply the same limits.", "percentunit",
                  (share(denials, decisions), "{{instance}}")),
            graph("Latency by server", "99 % of the measured decisions took at most this long, "
                  "over five minutes. The alert TidegateSlowDecisions fires above 10 ms. Needs the "
                  "recording rules of contrib/prometheus.", "s",
                  (f"job_instance:tidegate_decision_duration_seconds:p99_5m{{{SERVER}}}",
                   "{{instance}}")),
            graph("Connections", "Open connections by server and listener.", "short",
                  (f"sum by (instance, listener) (tidegate_connections{{{SERVER}}})",
                   "{{instance}} {{listener}}")),
            graph("Refused and evicted connections", "`full`: refused, because the listener was "
                  "full of busy connections. `client`: refused, because the client had too many. "
                  "`evicted`: an idle connection was closed to make room.", "reqps",
                  *((rate_by("instance", f"tidegate_connections_{name}_total"),
                     "{{instance}} " + word) for name, word in
                    (("refused", "full"), ("refused_to_client", "client"), ("evicted", "evicted")))),
            graph("Failed authentications", "Attempts with a wrong token or password. `limited`: "
                  "not even checked, because the address had too many.", "reqps",
                  (rate_by("instance, listener, reason", "tidegate_authentication_failures_total"),
                   "{{instance}} {{listener}} {{reason}}")),
        ]),
        ("Memory", [
            graph("Keys", "Keys in the memory store. With Redis, these are the keys of the local "
                  "share.", "short", (f"sum by (instance) (tidegate_keys{{{SERVER}}})",
                                      "{{instance}}"), width=8),
            graph("Memory in use", "Memory of the store, the lists of top talkers and the refund ledger.",
                  "bytes", (f"sum by (instance) (tidegate_store_bytes{{{SERVER}}})",
                            "{{instance}} store"),
                  (f"sum by (instance) (tidegate_top_bytes{{{SERVER}}})", "{{instance}} top talkers"),
                  (f"sum by (instance) (tidegate_refund_ledger_bytes{{{SERVER}}})",
                   "{{instance}} refund ledger"), width=8),
            graph("Removed keys, and a full store", "Expired keys are normal. Evicted keys were "
                  "alive. `full` counts requests that found no memory.", "short",
                  (rate_by("instance", "tidegate_keys_expired_total"), "{{instance}} expired"),
                  (rate_by("instance", "tidegate_keys_evicted_total"), "{{instance}} evicted"),
                  (rate_by("instance, outcome", "tidegate_store_full_total"),
                   "{{instance}} full: {{outcome}}"), width=8),
        ]),
        ("Configuration", [
            table("Versions, and the state of the files", "1: the last attempt succeeded. 0: the "
                  "old rules stay active, or a restart would lose counters. Different numbers of "
                  "limits mean that servers have different rules.", [
                      (f"max by (instance, version) (tidegate_build_info{{{SERVER}}})", "Running",
                       "short"),
                      (f"max by (instance) (tidegate_uptime_seconds{{{SERVER}}})", "Uptime", "s"),
                      (f"count by (instance) (tidegate_limit{{{SERVER}}})", "Limits", "short"),
                      (f"min by (instance) (tidegate_last_reload_success{{{SERVER}}})", "Last reload",
                       "short"),
                      (f"min by (instance) (tidegate_last_snapshot_success{{{SERVER}}})",
                       "Last snapshot", "short"),
                  ], hidden=["Value #A"], width=24),
            graph("Reloads", "Reloads of the rules file, by result.", "short",
                  (f"sum by (instance, result) (increase(tidegate_reloads_total{{{SERVER}}}"
                   "[$__rate_interval]))", "{{instance}} {{result}}"), width=8),
            graph("Published lists of top talkers", "Each server writes its lists to Redis once a "
                  "minute, so that every server can answer for all.", "short",
                  (f"sum by (instance, result) (increase(tidegate_top_publications_total{{{SERVER}}}"
                   "[$__rate_interval]))", "{{instance}} {{result}}"), width=8),
            graph("Renewed concurrency slots", "`held`: renewed. `lost`: the lease had expired, so "
                  "other requests hold the slots. `unknown`: Redis did not answer.", "reqps",
                  (rate_by("instance, result", "tidegate_lease_renewals_total"),
                   "{{instance}} {{result}}"), width=8),
        ]),
        ("Reverse proxy", [
            graph("Responses of upstreams", "Responses by upstream and status. Empty without "
                  "`proxy` in the rules file.", "reqps",
                  (rate_by("upstream, status", "tidegate_proxy_responses_total"),
                   "{{upstream}} {{status}}"), stacked=True),
            graph("Requests without a response", "Requests that no endpoint answered, by upstream "
                  "and failure.", "reqps",
                  (rate_by("upstream, failure", "tidegate_proxy_failures_total"),
                   "{{upstream}} {{failure}}")),
            graph("Healthy endpoints", "Endpoints of an upstream that are in use. At 0, most "
                  "requests fail.", "short",
                  (f"sum by (instance, upstream) (tidegate_proxy_endpoint_up{{{SERVER}}})",
                   "{{instance}} {{upstream}}")),
            graph("Requests in flight", "Requests that wait for an upstream.", "short",
                  (f"sum by (instance, upstream) (tidegate_proxy_in_flight{{{SERVER}}})",
                   "{{instance}} {{upstream}}")),
        ]),
    ]


def variable(name, label, query):
    """A variable with the values of a label. All values are selected at first."""
    return {
        "name": name, "label": label, "type": "query", "datasource": DATASOURCE,
        "definition": query, "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1,
        "multi": True, "includeAll": True, "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def dashboard(uid, title, description, rows, variables):
    panels, y = [], 0
    for name, row in rows:
        panels.append({"type": "row", "title": name, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        x, y, tallest = 0, y + 1, 0
        for one in row:
            place = one["gridPos"]
            if x + place["w"] > 24:
                x, y, tallest = 0, y + tallest, 0
            one["gridPos"] = {"x": x, "y": y, **place}
            x, tallest = x + place["w"], max(tallest, place["h"])
            panels.append(one)
        y += tallest
    for number, one in enumerate(panels, 1):
        one["id"] = number
    datasource = {"name": "datasource", "label": "Data source", "type": "datasource",
                  "query": "prometheus", "current": {}, "hide": 0}
    alerts = {
        "name": "Alerts", "datasource": DATASOURCE, "enable": True, "iconColor": "red",
        "expr": FIRING,
        "titleFormat": "{{alertname}}", "textFormat": "{{instance}} {{rule}}", "step": "1m",
    }
    links = [
        {"type": "dashboards", "title": "Other dashboards of Tidegate", "tags": ["tidegate"],
         "asDropdown": True, "includeVars": True, "keepTime": True, "icon": "external link"},
        {"type": "link", "title": "What to do about an alert", "url": f"{DOCS}/alerts.md",
         "targetBlank": True, "icon": "doc"},
    ]
    return {
        "uid": uid, "title": title, "description": description, "tags": ["tidegate"],
        "schemaVersion": 39, "version": 1, "editable": True, "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"}, "refresh": "30s", "timezone": "browser",
        "templating": {"list": [datasource, *variables]}, "annotations": {"list": [alerts]},
        "links": links, "panels": panels,
    }


def dashboards():
    servers = [
        variable("job", "Job", "label_values(tidegate_build_info, job)"),
        variable("instance", "Server", f"label_values(tidegate_build_info{{{JOB}}}, instance)"),
    ]
    rule = variable("rule", "Rule", f"label_values(tidegate_rule_decisions_total{{{SERVER}}}, rule)")
    yield "tidegate-operators.json", dashboard(
        "tidegate-operators", "Tidegate: limits",
        "What is limited, by which rule, how full the limits are, and how long decisions take.",
        operators(), [*servers, rule])
    yield "tidegate-fleet.json", dashboard(
        "tidegate-fleet", "Tidegate: fleet",
        "The servers, their Redis, and whether decisions are exact.", fleet(), servers)


def main():
    is_check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not is_check:
        sys.exit(__doc__)
    for name, content in dashboards():
        path = os.path.join(FOLDER, name)
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        if not is_check:
            with open(path, "w") as file:
                file.write(text)
            continue
        with open(path) as file:
            if file.read() != text:
                sys.exit(f"{path} is out of date: run {sys.argv[0]}")


if __name__ == "__main__":
    main()
