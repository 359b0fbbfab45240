//! Metrics of a node that uses Redis, and of the Redis servers.

use tidegate_net::prometheus::Text;
use tidegate_redis::FallbackStats;

pub(super) fn write(text: &mut Text, redis: &FallbackStats) {
    let name = "tidegate_decisions_by_source_total";
    text.family(name, "counter", "Decisions by source.");
    for (source, count) in redis.decisions {
        text.sample(name, &[("source", source.as_str())], count);
    }
    let name = "tidegate_redis_failures_total";
    let help = "Failed Redis requests by reason.";
    text.family(name, "counter", help);
    for (failure, count) in redis.failures {
        text.sample(name, &[("failure", failure)], count);
    }
    let help =
        "Tidegate servers that share this Redis, as last counted; 0 if they are not counted.";
    let servers = redis.servers.map_or(0, u64::from);
    text.single("tidegate_fleet_servers", "gauge", help, servers);
    let size = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let health = &redis.health;
    let help = "Known Redis servers.";
    text.single(
        "tidegate_redis_servers",
        "gauge",
        help,
        size(health.servers),
    );
    let help = "Redis servers that are up.";
    text.single("tidegate_redis_servers_up", "gauge", help, size(health.up));
    let help = "Redis Cluster slots that no known node serves.";
    text.single(
        "tidegate_redis_slots_undecided",
        "gauge",
        help,
        size(health.unserved_slots),
    );
    let help = "Circuit breaker openings.";
    text.single(
        "tidegate_redis_circuit_opens_total",
        "counter",
        help,
        health.circuit_opens,
    );
    let help = "Batches of requests sent to Redis.";
    text.single(
        "tidegate_redis_batches_total",
        "counter",
        help,
        health.batches,
    );
}
