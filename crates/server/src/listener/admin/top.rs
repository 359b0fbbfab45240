//! `GET /v1/top`: the keys with the most requests, denials or cost.

use std::sync::Arc;

use hyper::StatusCode;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use tidegate_core::top::Tally;
use tidegate_limiter::{
    ServerLimiter,
    top::{TopError, TopList, TopQuery, TopRow},
};
use tidegate_net::{
    Problem,
    input::shown,
    response::{Answer, json},
};

use super::{super::top, path::no_rule};

pub(super) async fn list(limiter: &Arc<ServerLimiter>, query: &str) -> Result<Answer, Problem> {
    let query = read(query)?;
    let list = top::answer(limiter, query.clone()).await;
    let list = list.map_err(|failure| problem(limiter, &failure))?;
    Ok(json(StatusCode::OK, &document(&query, &list)))
}

fn read(query: &str) -> Result<TopQuery, Problem> {
    let (mut read, mut seen) = (top::default_query(), Vec::new());
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = percent_decode_str(value).decode_utf8();
        let value =
            value.map_err(|_| Problem::bad(shown(name), "is not UTF-8 after percent-decoding"))?;
        let wrong = |problem| Problem::bad(name, problem);
        match name {
            "rule" => read.rule = Some(value.into_owned()),
            "by" => read.by = top::measure(&value).map_err(wrong)?,
            "over" => read.over = top::period(&value).map_err(wrong)?,
            "n" => read.count = top::count(&value).map_err(wrong)?,
            _ => {
                let problem = "is not a parameter; the parameters are rule, by, over and n";
                return Err(Problem::bad(shown(name), problem));
            }
        }
        if seen.contains(&name) {
            return Err(Problem::bad(name, "is given twice; give it once"));
        }
        seen.push(name);
    }
    Ok(read)
}

fn problem(limiter: &ServerLimiter, failure: &top::Failure) -> Problem {
    let status = match failure {
        top::Failure::Top(TopError::UnknownRule(name)) => {
            return no_rule(&limiter.rules(), name, &[]);
        }
        top::Failure::Top(TopError::Off | TopError::Unlisted(_)) => StatusCode::CONFLICT,
        top::Failure::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
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
        let hint = format!("requests of other servers are missing: {problem}");
        document["hint"] = hint.into();
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
