//! Tests the headers and bodies of responses, and the request extension for inner services.

use tidegate::RateLimiter;
use tidegate_core::{AlgorithmName, Cost, LimitSpec, Rule, notation};
use tidegate_tower::{HeaderWriter, Legacy, RateLimitLayer, RuleNames};
use tower::Layer;

use crate::{
    settlement::places,
    support::{Notes, fixed, get, limited, limiter, send, statuses},
};

#[tokio::test]
async fn every_response_has_headers_and_a_denial_is_a_problem_document() {
    let (_, mut service) = limited(vec![fixed("all", "1/min")]);
    let allowed = send(&mut service, get("/")).await;
    assert_eq!(allowed.body, "served");
    assert_eq!(allowed.header("ratelimit"), Some("\"1/min\";r=0;t=60"));
    assert_eq!(
        allowed.header("ratelimit-policy"),
        Some("\"1/min\";q=1;w=60")
    );
    assert_eq!(allowed.header("retry-after"), None);
    let denied = send(&mut service, get("/")).await;
    assert_eq!(denied.status, 429);
    assert_eq!(denied.header("retry-after"), Some("60"));
    assert_eq!(denied.header("ratelimit"), Some("\"1/min\";r=0;t=60"));
    assert_eq!(
        denied.header("content-type"),
        Some("application/problem+json")
    );
    assert_eq!(
        denied.body,
        r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Too Many Requests","status":429,"detail":"1/min exceeded; retry in 1min","violated-policies":["1/min"],"retry_after_ms":60000}"#
    );
}

#[tokio::test]
async fn rule_names_are_shown_if_configured() {
    let headers = HeaderWriter::default().with_rule_names(RuleNames::Shown);
    let limiter = limiter(vec![fixed("all", "1/min")]);
    let layer = RateLimitLayer::new(limiter).headers(headers);
    let mut service = layer.layer(Notes::default());
    let allowed = send(&mut service, get("/")).await;
    assert_eq!(allowed.header("ratelimit"), Some("\"all\";r=0;t=60"));
    let denied = send(&mut service, get("/")).await;
    let expected =
        r#""detail":"1/min of \"all\" exceeded; retry in 1min","violated-policies":["all"]"#;
    assert!(denied.body.contains(expected), "{}", denied.body);
}

#[tokio::test]
async fn a_cost_that_never_fits_is_denied_for_good() {
    let limiter = limiter(vec![fixed("all", "5/min")]);
    let mut service = RateLimitLayer::new(limiter)
        .cost(Cost::new(6).unwrap())
        .layer(Notes::default());
    let denied = send(&mut service, get("/")).await;
    assert_eq!((denied.status, denied.header("retry-after")), (429, None));
    assert!(
        denied.body.contains("retrying will not succeed"),
        "{}",
        denied.body
    );
    let never = "\"retry_after_ms\":null";
    assert!(denied.body.contains(never), "{}", denied.body);
}

#[tokio::test]
async fn a_block_denies_without_revealing_its_key() {
    let limiter = limiter(vec![
        fixed("all", "5/min").keyed_by(&["header.key"]).unwrap(),
    ]);
    let key = limiter
        .rules()
        .rule("all")
        .unwrap()
        .encode_key(&["secret"])
        .unwrap();
    limiter.store().block(&key, None, "abuse", limiter.now());
    let mut service = RateLimitLayer::new(limiter).layer(Notes::default());
    let mut request = get("/");
    request
        .headers_mut()
        .insert("key", "secret".parse().unwrap());
    let denied = send(&mut service, request).await;
    assert_eq!(denied.status, 429);
    assert!(denied.body.contains("blocked; "), "{}", denied.body);
    let abnormal =
        r#"{"type":"https://iana.org/assignments/http-problem-types#abnormal-usage-detected""#;
    assert!(denied.body.starts_with(abnormal), "{}", denied.body);
    for hidden in ["secret", "all"] {
        assert!(!denied.body.contains(hidden), "{}", denied.body);
    }
}

#[tokio::test]
async fn an_uncountable_request_is_refused_with_its_field() {
    let (notes, mut service) = limited(vec![
        fixed("secret", "1/min").keyed_by(&["query.q"]).unwrap(),
    ]);
    let long = format!("/?q={}", "x".repeat(2_000));
    let refused = send(&mut service, get(&long)).await;
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("entries.query.q"), "{}", refused.body);
    assert!(!refused.body.contains("retry_after_ms"), "{}", refused.body);
    assert!(!refused.body.contains("secret"), "{}", refused.body);
    assert!(notes.paths().is_empty());
}

#[tokio::test]
async fn the_inner_service_sees_the_verdict_and_soft_limits_are_marked() {
    let spec = LimitSpec::shorthand(notation::rate("2/min").unwrap(), AlgorithmName::FixedWindow);
    let soft = spec.build().unwrap().with_soft_percent(50).unwrap();
    let (notes, mut service) = limited(vec![Rule::new("soft", vec![soft]).unwrap()]);
    for (over_limit, remaining) in [(false, 2), (false, 1), (true, 0)] {
        assert_eq!(statuses(&mut service, "/", 1).await, [200]);
        let passed = notes.last();
        assert_eq!(passed.rule.as_deref(), Some("soft"));
        assert_eq!(
            (passed.over_limit, passed.remaining),
            (over_limit, Some(remaining))
        );
    }
    assert_eq!(statuses(&mut service, "/", 1).await, [429]);
}

#[tokio::test]
async fn several_layers_and_the_service_combine_their_headers() {
    let legacy = |limiter| {
        let headers = HeaderWriter::new(true, Legacy::Delta);
        RateLimitLayer::new(limiter).headers(headers)
    };
    let inner = legacy(limiter(vec![fixed("inner", "9/min")]));
    let outer = legacy(limiter(vec![fixed("outer", "2/min")]));
    let notes = Notes::default().with_header("ratelimit", "\"app\";r=1");
    let mut service = outer.layer(inner.layer(notes));
    let answer = send(&mut service, get("/")).await;
    let lines: Vec<_> = answer.headers.get_all("ratelimit").iter().collect();
    assert_eq!(
        lines,
        ["\"app\";r=1", "\"9/min\";r=8;t=60", "\"2/min\";r=1;t=60"]
    );
    assert_eq!(answer.header("x-ratelimit-remaining"), Some("1"));
    assert_eq!(answer.header("x-ratelimit-limit"), Some("2"));
    assert_eq!(statuses(&mut service, "/", 2).await, [200, 429]);
}

/// The tighter limit's `X-RateLimit-*` headers replace all three headers of the other limit.
#[tokio::test]
async fn a_concurrency_limit_in_another_layer_removes_the_reset_header() {
    let legacy = |limiter| {
        let headers = HeaderWriter::new(true, Legacy::Delta);
        RateLimitLayer::new(limiter).headers(headers)
    };
    let rate = || legacy(limiter(vec![fixed("rate", "9/min")]));
    let slots = || legacy(limiter(vec![places(2)]));
    for mut service in [
        slots().layer(rate().layer(Notes::default())),
        rate().layer(slots().layer(Notes::default())),
    ] {
        let answer = send(&mut service, get("/")).await;
        assert_eq!(answer.header("x-ratelimit-remaining"), Some("1"));
        assert_eq!(answer.header("x-ratelimit-limit"), Some("2"));
        assert_eq!(answer.header("x-ratelimit-reset"), None);
        let states: Vec<_> = answer.headers.get_all("ratelimit").iter().collect();
        assert_eq!(states.len(), 2, "{states:?}");
    }
}
