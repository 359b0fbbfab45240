//! Decides the request in a NOTIFY frame, and writes the ACK frame.
//!
//! All messages in a NOTIFY belong to one event of one stream. Therefore, the arguments of all
//! these messages are the entries of a single request, and a NOTIFY gets a single decision. The
//! argument `cost` sets the request's cost. An argument without a value, such as an absent header,
//! is ignored.
//!
//! An ACK is sent for each NOTIFY whose payload can be decoded. The agent denies an invalid
//! request. If the agent did not answer, HAProxy would admit the request, so a client could evade
//! its limit with an ambiguous path.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName, header::RETRY_AFTER};
use tidegate::{DecidedRequest, RateLimiter as _};
use tidegate_config::entry_name;
use tidegate_core::{
    Cost, Effect, Request, RequestError,
    bounds::{MAX_COUNT, MAX_ENTRIES},
    notation::integer_advice,
};
use tidegate_limiter::{
    ServerLimiter,
    entries::{AuditedRequest, Origin, Spelling, normalize, rewritten},
    metrics::ListenerKind,
    with_scratch,
};
use tidegate_tower::HeaderWriter;

use super::{
    super::http::status,
    frame::{Actions, Disconnect, Frame, MALFORMED, Reader, SpopValue, put_ack},
};

/// The name of the argument that sets the request's cost.
const COST: &str = "cost";

/// The arguments of all messages in a NOTIFY.
#[derive(Debug)]
struct SpopArguments<'b> {
    /// The entries. At most [`MAX_ENTRIES`] + 1 entries are kept.
    entries: Vec<(Cow<'b, str>, Cow<'b, str>)>,
    cost: Option<SpopValue<'b>>,
    /// Whether the messages contain different costs.
    has_two_costs: bool,
}

impl<'b> SpopArguments<'b> {
    /// Decodes the list of messages in `payload`.
    fn read(payload: &'b [u8]) -> Option<Self> {
        let mut arguments = Self {
            entries: Vec::new(),
            cost: None,
            has_two_costs: false,
        };
        let mut reader = Reader(payload);
        while !reader.is_at_end() {
            // The message name is ignored.
            reader.bytes()?;
            for _ in 0..reader.byte()? {
                let name = String::from_utf8_lossy(reader.bytes()?);
                arguments.add(name, reader.value()?);
            }
        }
        Some(arguments)
    }

    fn add(&mut self, name: Cow<'b, str>, value: SpopValue<'b>) {
        if name == COST {
            let other = self.cost.filter(|_| value != SpopValue::Null);
            self.has_two_costs |= other.is_some_and(|other| text(other) != text(value));
            if value != SpopValue::Null {
                self.cost = Some(value);
            }
            return;
        }
        let Some(text) = text(value) else {
            return;
        };
        let name = match entry_name(&name) {
            Cow::Owned(lower_case) => Cow::Owned(lower_case),
            Cow::Borrowed(_) => name,
        };
        let entry = (name, text);
        // Two messages may contain the same argument. If the values of the two arguments differ,
        // the request is rejected later. A request with too many entries is also rejected later, so
        // one excess entry is enough.
        if self.entries.len() <= MAX_ENTRIES && !self.entries.contains(&entry) {
            self.entries.push(entry);
        }
    }

    fn cost(&self) -> Result<Cost, RequestError> {
        if self.has_two_costs {
            return Err(RequestError::new(COST, "has several different values"));
        }
        let count = match self.cost {
            None | Some(SpopValue::Null) => return Ok(Cost::ONE),
            Some(SpopValue::Unsigned(number)) => Some(number),
            Some(SpopValue::Signed(number)) => u64::try_from(number).ok(),
            Some(SpopValue::Bytes(text)) => std::str::from_utf8(text)
                .ok()
                .and_then(|text| text.parse().ok()),
            Some(_) => None,
        };
        let wrong = || {
            let text = match self.cost {
                Some(SpopValue::Bytes(text)) => std::str::from_utf8(text).unwrap_or_default(),
                _ => "",
            };
            let advice = integer_advice(text, &(1..=MAX_COUNT));
            let problem = format!("must be an integer from 1 to {MAX_COUNT}{advice}");
            RequestError::new(COST, problem)
        };
        Cost::new(count.ok_or_else(wrong)?)
    }
}

/// Converts a value to a string; returns `None` if the value is absent or empty.
fn text(value: SpopValue<'_>) -> Option<Cow<'_, str>> {
    Some(match value {
        SpopValue::Null | SpopValue::Bytes(b"") => return None,
        SpopValue::Bool(is_true) => Cow::Borrowed(if is_true { "true" } else { "false" }),
        SpopValue::Signed(number) => number.to_string().into(),
        SpopValue::Unsigned(number) => number.to_string().into(),
        SpopValue::Ip(ip) => ip.to_string().into(),
        // A client may send any bytes. Invalid UTF-8 is replaced with U+FFFD, because an entry must
        // be a valid string.
        SpopValue::Bytes(bytes) => String::from_utf8_lossy(bytes),
    })
}

/// Decides the request in `notify`, and returns the encoded ACK.
pub(super) async fn answer(
    limiter: &ServerLimiter,
    writer: &HeaderWriter,
    notify: &Frame<'_>,
    max_frame_bytes: usize,
) -> Result<Vec<u8>, Disconnect> {
    let arguments = SpopArguments::read(notify.payload).ok_or(MALFORMED)?;
    let mut out = Vec::new();
    let rules = limiter.rules();
    let decided = with_scratch(async |scratch| {
        let cost = arguments.cost()?;
        let entries: Vec<(&str, &str)> = arguments
            .entries
            .iter()
            .map(|(name, value)| (&**name, &**value))
            .collect();
        let replaced = normalize(limiter.trust(), &rules, Spelling::Normalized, &entries)?;
        let entries = rewritten(&entries, &replaced);
        let request = Request::new(&entries, cost)?;
        let now = limiter.now();
        let verdict = limiter
            .check(&rules, scratch, &request, Effect::Charge)
            .boxed()
            .await?;
        let audited = AuditedRequest {
            listener: ListenerKind::Spop,
            origin: Origin::Service,
            decided: DecidedRequest {
                request: &request,
                rules: &rules,
                now,
            },
        };
        limiter.observe_and_audit(audited, &verdict);
        let mut headers = HeaderMap::new();
        writer.clone().write_once(&verdict, now, &mut headers);
        put_ack(&mut out, notify.id, max_frame_bytes, |actions| {
            set_verdict(actions, &verdict, &headers);
        });
        Ok::<_, RequestError>(())
    });
    if let Err(error) = decided.await {
        limiter.metrics().count_bad_request(ListenerKind::Spop);
        put_ack(&mut out, notify.id, max_frame_bytes, |actions| {
            set_problem(actions, &error.to_string());
        });
    }
    Ok(out)
}

/// The variables that not every outcome sets. Each outcome unsets the variables that it does not
/// set itself.
const OPTIONAL: [&str; 6] = [
    "retry_after",
    "remaining",
    "limit",
    "reason",
    "rule",
    "problem",
];

/// The variables that contain response headers. A verdict may set any subset of these variables.
const FIELDS: [&str; 5] = [
    "ratelimit",
    "ratelimit_policy",
    "x_ratelimit_limit",
    "x_ratelimit_remaining",
    "x_ratelimit_reset",
];

/// Sets the variables for `verdict` and its response headers. The most important variables come
/// first, because variables that do not fit into the frame are left out.
fn set_verdict(
    actions: &mut Actions<'_>,
    verdict: &tidegate_core::Verdict<'_>,
    headers: &HeaderMap,
) {
    let leading = verdict.leading().map(|line| &line.outcome);
    let retry_after = headers.get(RETRY_AFTER).and_then(|value| {
        let text = value.to_str().ok()?;
        text.parse().ok().map(SpopValue::Unsigned)
    });
    actions.set("allowed", SpopValue::Bool(verdict.allowed));
    actions.set(
        "status",
        SpopValue::Unsigned(status(verdict).as_u16().into()),
    );
    let bytes = |text: &'static str| SpopValue::Bytes(text.as_bytes());
    let values = [
        retry_after,
        leading.map(|outcome| SpopValue::Unsigned(outcome.remaining)),
        leading.map(|outcome| SpopValue::Unsigned(outcome.limit)),
        verdict.reason.map(|reason| bytes(reason.as_str())),
        verdict.rule.map(|rule| SpopValue::Bytes(rule.as_bytes())),
        None,
    ];
    for (name, value) in OPTIONAL.into_iter().zip(values) {
        match value {
            Some(value) => actions.set(name, value),
            None => actions.unset(name),
        }
    }
    for (name, value) in headers.iter().filter(|(name, _)| *name != RETRY_AFTER) {
        actions.set(&variable(name), SpopValue::Bytes(value.as_bytes()));
    }
    let is_set = |field: &str| headers.keys().any(|name| variable(name) == field);
    for field in FIELDS.into_iter().filter(|field| !is_set(field)) {
        actions.unset(field);
    }
}

/// Returns the name of the variable that contains the header `name`.
fn variable(name: &HeaderName) -> String {
    name.as_str().replace('-', "_")
}

/// Sets the variables that deny an invalid request.
fn set_problem(actions: &mut Actions<'_>, problem: &str) {
    actions.set("allowed", SpopValue::Bool(false));
    actions.set("status", SpopValue::Unsigned(400));
    for name in OPTIONAL.into_iter().chain(FIELDS) {
        if name != "problem" {
            actions.unset(name);
        }
    }
    actions.set("problem", SpopValue::Bytes(problem.as_bytes()));
}
