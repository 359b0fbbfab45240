//! Metrics of a node that uses Redis, and of the Redis servers.

use tidegate_net::prometheus::{Metric, Page, count};
use tidegate_redis::FallbackStats;

const DECISIONS: Metric<1> = Metric::counter(
    "tidegate_decisions_by_source_total",
    ["source"],
    "Decisions by source.",
);
const FAILURES: Metric<1> = Metric::counter(
    "tidegate_redis_failures_total",
    ["failure"],
    "Failed Redis requests by reason.",
);
const FLEET_SERVERS: Metric = Metric::gauge(
    "tidegate_fleet_servers",
    [],
    "Tidegate servers that share this Redis, at the last count; 0 if they have not been counted.",
);
const SERVERS: Metric = Metric::gauge("tidegate_redis_servers", [], "Known Redis servers.");
const SERVERS_UP: Metric = Metric::gauge(
    "tidegate_redis_servers_up",
    [],
    "Redis servers that are up.",
);
const SLOTS_UNDECIDED: Metric = Metric::gauge(
    "tidegate_redis_slots_unserved",
    [],
    "Redis Cluster hash slots that no reachable node serves.",
);
const CIRCUIT_OPENS: Metric = Metric::counter(
    "tidegate_redis_circuit_opens_total",
    [],
    "Circuit breaker openings of a Redis server.",
);
const BATCHES: Metric = Metric::counter(
    "tidegate_redis_batches_total",
    [],
    "Batches of requests sent to Redis.",
);

pub(super) fn collect(redis: &FallbackStats, page: &mut Page<'_>) {
    let decisions = redis.decisions.iter();
    page.family(
        &DECISIONS,
        decisions.map(|(source, count)| ([source.as_str()], *count)),
    );
    let failures = redis.failures.iter();
    page.family(
        &FAILURES,
        failures.map(|(failure, count)| ([*failure], *count)),
    );
    page.single(&FLEET_SERVERS, redis.servers.map_or(0, u64::from));
    let health = &redis.health;
    page.single(&SERVERS, count(health.servers));
    page.single(&SERVERS_UP, count(health.up));
    page.single(&SLOTS_UNDECIDED, count(health.unserved_slots));
    page.single(&CIRCUIT_OPENS, health.circuit_opens);
    page.single(&BATCHES, health.batches);
}
