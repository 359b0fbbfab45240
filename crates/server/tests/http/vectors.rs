//! Runs all test vectors against `POST /v1/throttle` over a real socket, with a precision of one
//! millisecond.

#[path = "../../../core/tests/vectors/compare.rs"]
mod compare;
#[path = "../../../core/tests/vectors/folder.rs"]
mod folder;
#[path = "../../../core/tests/vectors/format.rs"]
mod format;
#[path = "../../../core/tests/vectors/prediction.rs"]
mod prediction;
#[path = "../../../core/tests/vectors/runner.rs"]
mod runner;

use serde_json::{Map, Value, json};
use tidegate_core::{Effect, RetryAfter, Span, Timestamp};

use self::{
    format::{AnchorFields, CalendarFields, LimitFields, Number, RequestFields},
    prediction::Instants,
    runner::{Answer, Ask, Subject},
};
use crate::{client::Client, listener::TestListener};

#[test]
fn vectors_hold_through_throttle() {
    folder::run(|_| Throttle::open()).assert_success();
}

/// A listener and a connection to it.
struct Throttle {
    client: Client,
    listener: TestListener,
}

impl Throttle {
    fn open() -> Self {
        let listener = TestListener::open("");
        let client = listener.connect();
        Self { client, listener }
    }

    fn post(&mut self, body: &Map<String, Value>) -> crate::client::Answer {
        let body = serde_json::to_vec(body).unwrap();
        self.client.ask("POST", "/v1/throttle", &[], &body)
    }

    /// Returns the error for a rejected body, which starts with the field's name. Returns `None` if
    /// the body is accepted.
    fn refusal(&mut self, body: &Map<String, Value>) -> Option<String> {
        let answer = self.post(body);
        (answer.status == 400).then(|| answer.problem())
    }
}

impl Subject for Throttle {
    const PRECISION: Span = Span::from_millis(1);
    const INSTANTS: Instants = Instants::Halving;

    fn answer(&mut self, ask: &Ask<'_>) -> Result<Answer, String> {
        self.listener.set_clock(ask.now);
        let answer = self.post(&body_of(ask));
        let (status, body) = (answer.status, answer.body);
        let read = read(&body).map_err(|problem| format!("{status}: {problem} in {body}"))?;
        if status != if read.allowed { 200 } else { 429 } {
            return Err(format!("status {status} for {body}"));
        }
        Ok(read)
    }

    fn block(&mut self, key: &str, span: Span, now: Timestamp) -> Result<(), String> {
        let (store, mut buffer) = (self.listener.limiter.local_store(), Vec::new());
        let blocked = store.block(throttle_key(key, &mut buffer)?, Some(span), "by hand", now);
        blocked.then_some(()).ok_or_else(|| "no room".to_owned())
    }

    fn unblock(&mut self, key: &str, now: Timestamp) -> Result<(), String> {
        let (store, mut buffer) = (self.listener.limiter.local_store(), Vec::new());
        store.unblock(throttle_key(key, &mut buffer)?, now);
        Ok(())
    }

    fn reset(&mut self, key: &str, _now: Timestamp) -> Result<(), String> {
        let (store, mut buffer) = (self.listener.limiter.local_store(), Vec::new());
        store.reset(throttle_key(key, &mut buffer)?);
        Ok(())
    }

    fn refusal_of_limit(&mut self, fields: &LimitFields) -> Option<String> {
        let mut body = members(fields);
        body.insert("key".to_owned(), json!("refused"));
        self.refusal(&body)
    }

    fn refusal_of_request(&mut self, fields: &RequestFields) -> Option<String> {
        let mut body = Map::new();
        body.insert("key".to_owned(), json!(fields.key));
        if let Some(cost) = fields.cost {
            body.insert("cost".to_owned(), number(cost));
        }
        body.insert("limits".to_owned(), json!(["1/s"]));
        self.refusal(&body)
    }
}

fn throttle_key<'b>(key: &'b str, buffer: &'b mut Vec<u8>) -> Result<&'b [u8], String> {
    tidegate_limiter::throttle_key(key.as_bytes(), buffer).map_err(|problem| problem.to_string())
}

/// Builds a request body. The fields of a single limit are beside the key, and several limits are
/// in a list.
fn body_of(ask: &Ask<'_>) -> Map<String, Value> {
    let mut body = match ask.fields {
        [single] => members(single),
        several => {
            let limits = several.iter().map(|fields| Value::Object(members(fields)));
            Map::from_iter([("limits".to_owned(), limits.collect())])
        }
    };
    body.insert("key".to_owned(), json!(ask.key));
    body.insert("cost".to_owned(), json!(ask.cost.units()));
    body.insert("peek".to_owned(), json!(ask.effect == Effect::Peek));
    body
}

/// Encodes a limit for `/v1/throttle`.
fn members(fields: &LimitFields) -> Map<String, Value> {
    let LimitFields {
        algorithm,
        limit,
        window_ms,
        capacity,
        refill_tokens,
        refill_interval_ms,
        refill_mode,
        leak,
        leak_interval_ms,
        queue,
        rate,
        period_ms,
        burst,
        buckets,
        strict,
        anchor,
        soft_percent,
        count_denied,
        lease_ms,
    } = fields;
    let millis = |millis: &Number| json!(format!("{}ms", number(*millis)));
    let members = [
        ("algorithm", Some(json!(algorithm))),
        ("limit", limit.map(number)),
        ("window", window_ms.as_ref().map(millis)),
        ("lease", lease_ms.as_ref().map(millis)),
        ("capacity", capacity.map(number)),
        ("refill", rate_of(*refill_tokens, *refill_interval_ms)),
        ("refill_mode", refill_mode.as_ref().map(|mode| json!(mode))),
        ("leak", rate_of(*leak, *leak_interval_ms)),
        ("queue", queue.map(Value::Bool)),
        ("rate", rate_of(*rate, *period_ms)),
        ("burst", burst.map(number)),
        ("buckets", buckets.map(number)),
        ("strict", strict.map(Value::Bool)),
        ("anchor", anchor.as_ref().map(anchor_of)),
        ("soft", soft_percent.map(number)),
        ("count_denied", count_denied.map(Value::Bool)),
    ];
    let given = members
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?)));
    given.collect()
}

fn number(number: Number) -> Value {
    match number {
        Number::Natural(natural) => json!(natural),
        Number::Other(other) => json!(other),
    }
}

/// Formats a rate such as `5/1000ms`. A part that the test vector lacks is omitted.
fn rate_of(count: Option<Number>, period_ms: Option<Number>) -> Option<Value> {
    let text = match (count.map(number), period_ms.map(number)) {
        (None, None) => return None,
        (Some(count), None) => count.to_string(),
        (None, Some(millis)) => format!("/{millis}ms"),
        (Some(count), Some(millis)) => format!("{count}/{millis}ms"),
    };
    Some(Value::String(text))
}

fn anchor_of(anchor: &AnchorFields) -> Value {
    match anchor {
        AnchorFields::Name(name) if ["day", "week", "month"].contains(&name.as_str()) => {
            json!({"calendar": name})
        }
        AnchorFields::Name(name) => json!(name),
        AnchorFields::Calendar(CalendarFields {
            calendar,
            zone,
            day,
        }) => {
            let mut anchor = json!({"calendar": calendar});
            if let Some(zone) = zone {
                anchor["zone"] = json!(zone);
            }
            if let Some(day) = day {
                anchor["day"] = json!(day);
            }
            anchor
        }
    }
}

/// Parses the verdict in `body`. Returns an error if a field is missing.
fn read(body: &str) -> Result<Answer, String> {
    let verdict: Value = serde_json::from_str(body).map_err(|error| error.to_string())?;
    let lines = member(&verdict, "limits")?
        .as_array()
        .ok_or("limits: no list")?;
    let (mut over_limit, mut remaining) = (false, None);
    for line in lines {
        over_limit |= member(line, "over_limit")? == true;
        let left = whole(line, "remaining")?.ok_or("remaining: null in a line")?;
        remaining = Some(remaining.map_or(left, |least: u64| least.min(left)));
    }
    let retry = whole(&verdict, "retry_after_ms")?.map(Span::from_millis);
    Ok(Answer {
        allowed: member(&verdict, "allowed")? == true,
        reason: verdict
            .get("reason")
            .and_then(Value::as_str)
            .map(str::to_owned),
        over_limit: Some(over_limit),
        remaining,
        retry: retry.map_or(RetryAfter::Never, RetryAfter::After),
        reset: whole(&verdict, "reset_after_ms")?.map(Span::from_millis),
        delay: whole(&verdict, "delay_ms")?.map(Span::from_millis),
    })
}

fn member<'v>(object: &'v Value, name: &str) -> Result<&'v Value, String> {
    object.get(name).ok_or_else(|| format!("{name}: missing"))
}

/// Reads an integer or null from the field `name`.
fn whole(object: &Value, name: &str) -> Result<Option<u64>, String> {
    let value = member(object, name)?;
    match value.as_u64() {
        None if !value.is_null() => Err(format!("{name}: {value} is not a whole number")),
        number => Ok(number),
    }
}
