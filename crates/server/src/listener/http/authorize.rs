//! `ANY /v1/authorize`: the forward-auth endpoint for nginx, Caddy, Traefik and
//! Envoy.

use std::{
    borrow::Cow,
    sync::{Arc, Once},
};

use hyper::{
    Request, StatusCode,
    body::Incoming,
    header::{HOST, HeaderName, HeaderValue},
};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tidegate::{DecidedRequest, RateLimiter as _, rate_limiter::SlotTurn};
use tidegate_core::{Cost, Effect, RuleSet, Span, Timestamp, Verdict, notation};
use tidegate_identity::{
    AmbiguousRequest, DescribedRequest, ForwardAuthContext, ForwardAuthRequest, HeaderDialect,
    header_text, split_joined_headers,
};
use tidegate_limiter::{
    entries::{AuditedRequest, Origin, used_entries},
    metrics::ListenerKind,
    reservations::{Reservation, ReserveError},
    with_scratch,
};
use tidegate_net::{Problem, response::Answer};
use tidegate_tower::RuleNames;

use super::{
    HttpConnectionContext,
    reserve::{self, RESERVATION},
    status,
};

/// The options that an operator sets in the query of the forward-auth URL, in the proxy's
/// configuration.
#[derive(Debug)]
struct Options<'q> {
    /// The status code that replaces the default status of every denial.
    deny: Option<StatusCode>,
    dialect: HeaderDialect,
    /// The original request target, if the proxy is Envoy. Envoy appends the target to its
    /// `path_prefix`.
    envoy_target: Option<&'q str>,
    /// The number of trusted proxies in front of the calling proxy. If set, `clients.proxies` in
    /// the rules file is ignored for this request.
    hops: Option<usize>,
    /// Whether the response names the rule, for the proxy's log.
    logs_rule: bool,
    /// Whether the response contains the key's values, for the proxy's log.
    logs_key: bool,
    /// The time to live of the reservation. If not set, no reservation is made, and the request is
    /// charged immediately.
    reserve: Option<Span>,
}

/// The header with the verdict's rule. For a denial, this header names the rule that denied the
/// request. For an admitted request, this header names the rule whose limit is closest to being
/// exhausted.
const RULE: HeaderName = HeaderName::from_static("tidegate-rule");

/// The header with the values of the rule's key, separated by commas.
const KEY: HeaderName = HeaderName::from_static("tidegate-key");

/// The maximum length of a reservation token, in bytes. By default, nginx accepts a response only
/// if all its headers together have at most 4 KiB.
const MAX_TOKEN_BYTES: usize = 2_048;

/// The bytes that are percent-encoded when a rule name or a key value is written to a header.
const ENCODED: AsciiSet = CONTROLS.add(b' ').add(b'"').add(b'%').add(b',').add(b'\\');

/// The maximum length of each header value in bytes, for [`RULE`] and [`KEY`]. By default, nginx
/// accepts a response only if its whole head has at most 4 KiB.
const MAX_HEADER_BYTES: usize = 1_024;

/// The end of a truncated header: the percent-encoded `…`.
const TRUNCATED: &str = "%E2%80%A6";

impl Options<'_> {
    /// Adds the rule and the key to the headers of `answer`, for the proxy's log.
    fn add_log_headers(
        &self,
        answer: &mut Answer,
        decided: DecidedRequest<'_>,
        verdict: &Verdict<'_>,
        context: &HttpConnectionContext,
    ) {
        let Some(rule) = verdict.rule else {
            return;
        };
        let mut insert = |name, values: &[Cow<'_, str>]| {
            // Encoded text is always a valid header value.
            if let Ok(value) = HeaderValue::try_from(encoded(values)) {
                answer.headers_mut().insert(name, value);
            }
        };
        if self.logs_rule {
            insert(RULE, &[rule.into()]);
        }
        if self.logs_key {
            let mask = context.limiter.key_mask();
            let values = decided.key_of(rule);
            let values: Vec<Cow<'_, str>> = values.iter().map(|value| mask.value(value)).collect();
            insert(KEY, &values);
        }
    }
}

/// Percent-encodes `values` and joins them with commas. The result has at most
/// [`MAX_HEADER_BYTES`], and ends in [`TRUNCATED`] if it was truncated.
fn encoded(values: &[Cow<'_, str>]) -> String {
    let values = values.iter();
    let values: Vec<Cow<'_, str>> = values
        .map(|value| utf8_percent_encode(value, &ENCODED).into())
        .collect();
    let mut text = values.join(",");
    if text.len() > MAX_HEADER_BYTES {
        let mut end = MAX_HEADER_BYTES - TRUNCATED.len();
        while !is_between_characters(text.as_bytes(), end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str(TRUNCATED);
    }
    text
}

/// Returns whether `text` can be cut at `at` without splitting a percent-encoded character.
fn is_between_characters(text: &[u8], at: usize) -> bool {
    let is_inside_escape = text[..at].iter().rev().take(2).any(|byte| *byte == b'%');
    // A byte from 0x80 to 0xBF continues a UTF-8 character.
    let is_continued = matches!(text[at..], [b'%', b'8' | b'9' | b'A' | b'B', ..]);
    !is_inside_escape && !is_continued
}

pub(super) async fn authorize(
    context: &HttpConnectionContext,
    request: &Request<Incoming>,
) -> Result<Answer, Problem> {
    let options = options(request.uri().query().unwrap_or_default())?;
    let decided = decide(context, request, &options).await;
    // A malformed client request must be rejected with a status that the proxy passes on to the
    // client. For example, nginx does not pass on a 400 response.
    decided.map_err(|problem| match options.deny {
        Some(deny) if problem.is_bad_request() => problem.with_status(deny),
        _ => problem,
    })
}

async fn decide(
    context: &HttpConnectionContext,
    request: &Request<Incoming>,
    options: &Options<'_>,
) -> Result<Answer, Problem> {
    let identity = &context.identity;
    let hops = options
        .hops
        .map(|hops| identity.trust.clone().with_hops(hops));
    let sender = ForwardAuthContext {
        peer: context.peer,
        dialect: options.dialect,
        trust: hops.as_ref().unwrap_or(&identity.trust),
        derived: &identity.derived,
        geoip: identity.geoip.as_deref(),
    };
    let host = request.headers().get(HOST).map(header_text);
    let split;
    let forwarded = match options.envoy_target {
        Some(target) => {
            split = split_joined_headers(request.headers())
                .map_err(|error| Problem::new(StatusCode::BAD_REQUEST, error.to_string()))?;
            // Envoy's own request has the method and the host of the original request.
            let described = DescribedRequest {
                headers: &split,
                method: Some(request.method().as_str()),
                target: Some(target),
                host: host.as_deref(),
                scheme: None,
                peer: None,
                entries: &[],
            };
            ForwardAuthRequest::described(described, sender)
        }
        None => ForwardAuthRequest::parse(request.headers(), sender)
            .map_err(|ambiguous| ambiguous_request(&ambiguous))?,
    };
    decide_forwarded(context, options, &forwarded).await
}

fn ambiguous_request(ambiguous: &AmbiguousRequest) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, ambiguous.to_string())
}

/// Decides a request that a proxy has described.
async fn decide_forwarded(
    context: &HttpConnectionContext,
    options: &Options<'_>,
    forwarded: &ForwardAuthRequest<'_>,
) -> Result<Answer, Problem> {
    let rules = context.limiter.rules();
    warn_of_gaps(forwarded, &rules);
    let values = used_entries(forwarded, &rules);
    let values = values.map_err(|ambiguous| ambiguous_request(&ambiguous))?;
    let entries: Vec<(&str, &str)> = values
        .iter()
        .map(|(name, value)| (*name, &**value))
        .collect();
    let described = tidegate_core::Request::new(&entries, Cost::ONE)?;
    let names = context.headers.borrow().rule_names();
    with_scratch(async |scratch| {
        let limiter = &context.limiter;
        let now = limiter.now();
        let finish = |rules: &RuleSet, verdict: &Verdict<'_>| {
            let audited = AuditedRequest {
                listener: ListenerKind::Http,
                origin: Origin::Listener,
                decided: DecidedRequest {
                    request: &described,
                    rules,
                    now,
                },
            };
            limiter.observe_and_audit(audited, verdict);
            let mut answer = answer(context, options, verdict, now);
            options.add_log_headers(&mut answer, audited.decided, verdict, context);
            answer
        };
        let decided = match options.reserve {
            None => {
                let decision = limiter.check(&rules, scratch, &described, Effect::Charge);
                let verdict = decision.boxed().await.map_err(ReserveError::from);
                verdict.map(|verdict| (finish(&rules, &verdict), None))
            }
            Some(ttl) => {
                let turn = SlotTurn::at_once();
                let finish = |rules: &Arc<RuleSet>, verdict: &Verdict<'_>, reservation| {
                    (finish(rules, verdict), reservation)
                };
                let reserving = limiter.reserve(&rules, scratch, &described, ttl, turn, finish);
                // This future is boxed because it is large and because reservations are rarer than
                // checks.
                Box::pin(reserving).await
            }
        };
        let (mut answer, reservation) = decided.map_err(|error| refusal(error, names))?;
        if let Some(Reservation { token, .. }) = reservation {
            add_token(&mut answer, &token, context).await?;
        }
        Ok(answer)
    })
    .await
}

/// Reports that a request was not decided. The proxy may pass the error on to the client.
/// Therefore the cause, which can reveal rule names, is omitted if rule names are hidden.
fn refusal(error: ReserveError, names: RuleNames) -> Problem {
    match error {
        ReserveError::Request(error) if names == RuleNames::Hidden => error.without_cause().into(),
        error => reserve::refusal(error),
    }
}

/// Builds the response that contains a verdict.
fn answer(
    context: &HttpConnectionContext,
    options: &Options<'_>,
    verdict: &Verdict<'_>,
    now: Timestamp,
) -> Answer {
    // The configured status also replaces 503, because some proxies pass on only certain status
    // codes.
    let denied = options.deny.filter(|_| !verdict.allowed);
    let status = denied.unwrap_or_else(|| status(verdict));
    // nginx and Caddy do not read the body of an allowed response, and close the connection if
    // there is a body; without a body, they can reuse the connection.
    match verdict.allowed {
        true => context.headers_only(status, verdict, now),
        false => context.public_verdict(status, verdict, now),
    }
}

/// Adds a reservation token to `answer`. If the token is too long for the proxy, the reservation
/// could never be settled, so it is cancelled.
async fn add_token(
    answer: &mut Answer,
    token: &str,
    context: &HttpConnectionContext,
) -> Result<(), Problem> {
    if token.len() > MAX_TOKEN_BYTES {
        // If Redis does not respond, the reservation expires.
        let _ = Box::pin(context.limiter.settle_reservation(token, 0)).await;
        return Err(too_long_token(token.len()));
    }
    // A token is always a valid header value.
    if let Ok(token) = HeaderValue::try_from(token) {
        answer.headers_mut().insert(RESERVATION, token);
    }
    Ok(())
}

/// Returns the problem for a request that cannot be reserved because the keys of its rules are too
/// long.
fn too_long_token(bytes: usize) -> Problem {
    let detail = format!(
        "the keys of the rules are too long to be reserved: the token has {bytes} bytes, which \
         exceeds the maximum of {MAX_TOKEN_BYTES}"
    );
    Problem::new(StatusCode::BAD_REQUEST, detail)
}

/// Warns once if the proxy sends no path or no client address, which usually means that the proxy's
/// configuration is incomplete.
fn warn_of_gaps(forwarded: &ForwardAuthRequest<'_>, rules: &RuleSet) {
    static NO_PATH: Once = Once::new();
    static NO_CLIENT: Once = Once::new();
    if !forwarded.has_path() {
        NO_PATH.call_once(|| {
            tracing::warn!(
                "a forward-auth request has no path (X-Original-URI or X-Forwarded-Uri), so rules that use the path do not apply to it; logged once"
            );
        });
    }
    let counts_by_ip = || {
        rules
            .entry_names()
            .any(|name| matches!(name, "ip" | "ip.exact"))
    };
    if !forwarded.has_client_ip() && counts_by_ip() {
        NO_CLIENT.call_once(|| {
            tracing::warn!(
                "a forward-auth request has no client address (X-Real-IP from nginx, X-Forwarded-For from others), so its `ip` is the proxy's address, which all clients share; logged once"
            );
        });
    }
}

/// Splits the query at the option `path`, whose value is the rest of the query. The path comes from
/// the client, so it is not searched for options.
fn split_target(query: &str) -> (&str, Option<&str>) {
    const PATH: &str = "path=";
    if let Some(target) = query.strip_prefix(PATH) {
        return ("", Some(target));
    }
    match query.split_once("&path=") {
        Some((options, target)) => (options, Some(target)),
        None => (query, None),
    }
}

fn options(query: &str) -> Result<Options<'_>, Problem> {
    let (query, target) = split_target(query);
    let mut is_envoy = false;
    let mut options = Options {
        deny: None,
        dialect: HeaderDialect::Detect,
        envoy_target: target,
        hops: None,
        logs_rule: false,
        logs_key: false,
        reserve: None,
    };
    let mut seen = Vec::new();
    for (name, value) in query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
    {
        if seen.contains(&name) {
            let problem = format!("the option `{name}` is repeated; give each option once");
            return Err(Problem::bad("query", problem));
        }
        seen.push(name);
        match name {
            "deny" => {
                let status = value
                    .parse()
                    .ok()
                    .and_then(|code: u16| StatusCode::from_u16(code).ok());
                let refuses =
                    status.filter(|status| status.is_client_error() || status.is_server_error());
                options.deny = Some(refuses.ok_or_else(|| {
                    Problem::bad("deny", "must be a status from 400 to 599, such as 403")
                })?);
            }
            "proxy" if value == "envoy" => is_envoy = true,
            "proxy" => {
                options.dialect = HeaderDialect::parse(value).ok_or_else(|| {
                    Problem::bad("proxy", "must be nginx, caddy, traefik or envoy")
                })?;
            }
            "hops" => {
                let hops = value.parse().ok().filter(|hops| *hops <= 16);
                let wrong = || Problem::bad("hops", "must be a number from 0 to 16");
                options.hops = Some(hops.ok_or_else(wrong)?);
            }
            "log" => {
                for field in value.split(',') {
                    match field {
                        "rule" => options.logs_rule = true,
                        "key" => options.logs_key = true,
                        _ => return Err(Problem::bad("log", "must be rule, key or rule,key")),
                    }
                }
            }
            "reserve" => {
                let ttl = notation::span(value);
                let ttl = ttl.map_err(|error| Problem::bad("reserve", error.to_string()))?;
                if ttl < Span::from_millis(1) {
                    return Err(Problem::bad("reserve", "must be at least 1ms"));
                }
                options.reserve = Some(ttl);
            }
            _ => {
                return Err(Problem::bad(
                    "query",
                    format!(
                        "unknown option `{name}`; the options are deny, hops, log, path, proxy and reserve"
                    ),
                ));
            }
        }
    }
    check_target(is_envoy, target)?;
    Ok(options)
}

/// Rejects an option `path` that is missing or has no effect.
fn check_target(is_envoy: bool, target: Option<&str>) -> Result<(), Problem> {
    match (is_envoy, target) {
        (true, None) => Err(Problem::bad(
            "path",
            "is missing; set `path_prefix: /v1/authorize?proxy=envoy&path=` in the configuration \
             of Envoy, with `path=` at the end",
        )),
        (false, Some(_)) => Err(Problem::bad(
            "path",
            "is an option of proxy=envoy; remove it, or add proxy=envoy before it",
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use percent_encoding::percent_decode_str;

    use super::*;

    /// Wherever the string is cut, the result consists of complete characters followed by the
    /// truncation mark.
    #[test]
    fn a_long_key_is_truncated_between_characters() {
        for letter in ["a", "é", "€", "😀", "%"] {
            for ahead in 0..12 {
                let value = "x".repeat(ahead) + &letter.repeat(2_000);
                let text = encoded(&["first".into(), (&*value).into()]);
                assert!(text.len() <= MAX_HEADER_BYTES, "{text}");
                assert!(
                    text.len() > MAX_HEADER_BYTES - 2 * TRUNCATED.len() - 6,
                    "{text}"
                );
                let decoded = percent_decode_str(&text).decode_utf8().unwrap();
                let kept = decoded.strip_suffix('…').unwrap();
                assert!(format!("first,{value}").starts_with(kept), "{kept}");
            }
        }
        let short = encoded(&["a,b".into(), "c".into()]);
        assert_eq!(short, "a%2Cb,c");
    }
}
