//! Traffic in the last 15 minutes, by rule.

use hyper::{StatusCode, Uri};
use serde_json::{Value, json};
use tidegate_core::Span;
use tidegate_limiter::{
    ServerLimiter,
    metrics::{TRAFFIC_BUCKET, TRAFFIC_BUCKETS, TrafficCounts},
};
use tidegate_net::{
    Problem,
    response::{Answer, json},
};

use super::query::Query;

pub(super) fn show(limiter: &ServerLimiter, uri: &Uri) -> Result<Answer, Problem> {
    let (buckets, now) = (bucket_count(uri.query())?, limiter.now());
    let traffic = limiter.metrics().traffic(now, buckets);
    let rules = traffic.rules.iter().map(|(rule, counts)| {
        let mut document = series(counts);
        document["rule"] = json!(**rule);
        document
    });
    let document = json!({
        "now_ms": now.as_micros() / 1_000,
        "from_ms": traffic.from.as_micros() / 1_000,
        "bucket_ms": TRAFFIC_BUCKET.as_millis_ceil(),
        "total": series(&traffic.total),
        "rules": rules.collect::<Value>(),
    });
    Ok(json(StatusCode::OK, &document))
}

/// Returns the number of traffic buckets that cover the duration `over` from the query, rounded up.
/// Without `over`, returns the total number of buckets.
fn bucket_count(query: Option<&str>) -> Result<usize, Problem> {
    let query = Query::parse(query, &["over"], None)?;
    let over = query.span("over")?.unwrap_or_else(whole_ring);
    if over > whole_ring() {
        let problem = format!(
            "the server keeps traffic statistics for the last {} only; request a period no longer than that",
            whole_ring()
        );
        return Err(Problem::bad("over", problem));
    }
    let count = over.as_micros().div_ceil(TRAFFIC_BUCKET.as_micros());
    Ok(usize::try_from(count).unwrap_or(TRAFFIC_BUCKETS))
}

fn whole_ring() -> Span {
    let buckets = u64::try_from(TRAFFIC_BUCKETS).unwrap_or(u64::MAX);
    Span::from_micros(TRAFFIC_BUCKET.as_micros().saturating_mul(buckets))
}

/// Serialises the counts as one list for each kind of count, such as requests or denials.
fn series(counts: &[TrafficCounts]) -> Value {
    let list = |read: fn(&TrafficCounts) -> u64| counts.iter().map(read).collect::<Vec<u64>>();
    json!({
        "requests": list(|counts| counts.requests),
        "denied": list(|counts| counts.denied),
        "shadow_denied": list(|counts| counts.shadow_denied),
    })
}
