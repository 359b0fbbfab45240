//! `GET /v1/top`: the keys with the most requests, denials or cost. `GET /v1/history`: the requests
//! and denials of one key over time.

use std::sync::Arc;

use hyper::StatusCode;
use serde_json::{Value, json};
use tidegate_core::top::{Period, SumBounds, Tally};
use tidegate_identity::Trust;
use tidegate_limiter::{
    ServerLimiter,
    top::{HistoryQuery, TopError, TopList, TopQuery, TopRow},
};
use tidegate_net::{
    Problem,
    response::{Answer, json},
};

use super::{
    super::top,
    path::{KeyTarget, no_rule},
    query::Query,
};

pub(super) async fn list(
    limiter: &Arc<ServerLimiter>,
    query: Option<&str>,
) -> Result<Answer, Problem> {
    let query = read(query)?;
    let list = top::answer(limiter, query.clone()).await;
    let list = list.map_err(|failure| problem(limiter, &failure))?;
    Ok(json(StatusCode::OK, &document(&query, &list)))
}

fn read(query: Option<&str>) -> Result<TopQuery, Problem> {
    let query = Query::parse(query, &["rule", "by", "over", "n"], None)?;
    let defaults = top::default_query();
    let by = query.get("by").map(top::measure).transpose();
    let count = query.get("n").map(top::count).transpose();
    Ok(TopQuery {
        rule: query.get("rule").map(str::to_owned),
        by: by
            .map_err(|problem| Problem::bad("by", problem))?
            .unwrap_or(defaults.by),
        over: period(&query)?.unwrap_or(defaults.over),
        count: count
            .map_err(|problem| Problem::bad("n", problem))?
            .unwrap_or(defaults.count),
    })
}

fn period(query: &Query) -> Result<Option<Period>, Problem> {
    let over = query.get("over").map(top::period).transpose();
    over.map_err(|problem| Problem::bad("over", problem))
}

/// `GET /v1/history`: the requests and denials of one key in each time slice of a period.
pub(super) async fn history(
    limiter: &Arc<ServerLimiter>,
    query: Option<&str>,
    trust: &Trust,
) -> Result<Answer, Problem> {
    let query = Query::parse(query, &["rule", "key", "over"], Some("key"))?;
    let over = period(&query)?.unwrap_or(Period::Hour);
    let Some(rule) = query.get("rule") else {
        let problem = "is missing; name a rule, such as `rule=login&key=203.0.113.9`";
        return Err(Problem::bad("rule", problem));
    };
    let values: Vec<&str> = query.all("key").collect();
    let target = KeyTarget {
        rule,
        key: &values,
        trust,
    };
    let rules = limiter.rules();
    let (found, key) = target.find(&rules)?;
    let asked = HistoryQuery {
        rule: rule.to_owned(),
        key,
        over,
    };
    let history = top::history(limiter, asked).await;
    let history = history.map_err(|failure| problem(limiter, &failure))?;
    let slices = history.slices.iter().map(|slice| {
        json!({
            "at_ms": slice.start.as_micros() / 1_000,
            "requests": bounds_document(slice.requests),
            "denied": bounds_document(slice.denied),
        })
    });
    let mut document = json!({
        "rule": rule,
        "key": values,
        "over_ms": over.minutes() * 60_000,
        "slice_ms": history.slice_minutes * 60_000,
        "slices": slices.collect::<Vec<Value>>(),
        "servers": history.servers,
    });
    match &history.problem {
        Some(problem) => document["hint"] = missing_servers(problem).into(),
        None => document = target.hinted(document, found),
    }
    Ok(json(StatusCode::OK, &document))
}

fn bounds_document(bounds: SumBounds) -> Value {
    json!({"estimate": bounds.estimate, "error": bounds.error})
}

fn missing_servers(problem: &str) -> String {
    format!("requests of other servers are missing: {problem}")
}

fn problem(limiter: &ServerLimiter, failure: &top::TopFailure) -> Problem {
    let status = match failure {
        top::TopFailure::Top(TopError::UnknownRule(name)) => {
            return no_rule(&limiter.rules(), name, &[]);
        }
        top::TopFailure::Top(TopError::Off | TopError::Unlisted(_)) => StatusCode::CONFLICT,
        top::TopFailure::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
    };
    Problem::new(status, failure.to_string())
}

fn document(query: &TopQuery, list: &TopList) -> Value {
    let Tally {
        requests,
        denied,
        cost,
    } = list.total;
    let names_rule = query.rule.is_none();
    let rows = list.rows.iter().map(|row| row_document(row, names_rule));
    let mut document = json!({
        "by": query.by.as_str(),
        "over_ms": query.over.minutes() * 60_000,
        "from_ms": list.from.as_micros() / 1_000,
        "until_ms": list.until.as_micros() / 1_000,
        "total": {"requests": requests, "denied": denied, "cost": cost},
        "servers": list.servers,
        "rows": rows.collect::<Vec<Value>>(),
    });
    if let Some(problem) = &list.problem {
        document["hint"] = missing_servers(problem).into();
    }
    if let Some(rule) = &query.rule {
        document["rule"] = json!(rule);
    }
    document
}

fn row_document(row: &TopRow, names_rule: bool) -> Value {
    let mut document = json!({
        "key": row.key,
        "estimate": row.estimate,
        "error": row.error,
    });
    if names_rule {
        document["rule"] = json!(row.rule);
    }
    if row.database > 0 {
        document["database"] = json!(row.database);
    }
    document
}
