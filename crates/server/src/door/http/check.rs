//! `POST /v1/check` and `POST /v1/peek`.

use serde::Deserialize;
use tidegate_core::{Cost, Effect, Request, Scratch};

use super::{Asked, Problem, entries::Entries, status, wire::Answer};
use crate::metrics::Door;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body<'b> {
    #[serde(borrow)]
    entries: Entries<'b>,
    #[serde(default = "one")]
    cost: u64,
}

fn one() -> u64 {
    1
}

pub(super) fn check(asked: &Asked, body: &[u8], effect: Effect) -> Result<Answer, Problem> {
    let body: Body<'_> = serde_json::from_slice(body).map_err(|error| Problem::json(&error))?;
    let entries: Vec<(&str, &str)> = body
        .entries
        .0
        .iter()
        .map(|(name, value)| (&*name.0, &*value.0))
        .collect();
    let request = Request::new(&entries, Cost::new(body.cost)?)?;
    let (rules, mut scratch) = (asked.limiter.rules(), Scratch::default());
    let verdict = asked
        .limiter
        .check(&rules, &mut scratch, &request, effect)?;
    if effect == Effect::Charge {
        asked.limiter.observe(Door::Http, &verdict);
    }
    Ok(asked.verdict(status(verdict.allowed), &verdict))
}
