//! Tests of the section `proxy` of the rules file.
use std::time::Duration;

use tidegate_config::{Config, ForwardedHeaders, MinRate, Proxy, Underscores, Via};
use tidegate_core::{
    Span,
    concurrency::{AdaptiveSettings, Aimd, Gradient, Method},
};
use tidegate_tower::{ErrorFormat, HeadroomCondition, SlotShare};

use crate::{mistakes, warnings};

fn proxy(text: &str) -> Proxy {
    let config = Config::parse(text).unwrap_or_else(|mistakes| panic!("{mistakes:#?}"));
    config.proxy.unwrap()
}

#[test]
fn without_the_section_there_is_no_proxy() {
    assert!(Config::parse("").unwrap().proxy.is_none());
}

#[test]
fn omitted_settings_have_their_defaults() {
    let proxy = proxy(
        "proxy: {listen: '127.0.0.1:8000', upstreams: [{name: app, urls: 'http://127.0.0.1:3000'}]}",
    );
    assert_eq!(proxy.listen, ([127, 0, 0, 1], 8000).into());
    assert_eq!(proxy.max_body, None);
    assert_eq!(proxy.max_inspected_body, 1 << 20);
    assert_eq!(proxy.error_format, ErrorFormat::Auto);
    assert_eq!((proxy.max_head, proxy.max_headers), (64 << 10, 100));
    assert_eq!(proxy.max_connections, 10_000);
    assert_eq!(proxy.forwarded, ForwardedHeaders::XForwarded);
    assert_eq!(proxy.heads.underscores, Underscores::Drop);
    assert_eq!(proxy.heads.via, Via::new("tidegate"));
    let rate = MinRate {
        bytes_per_second: 240,
        grace: Duration::from_secs(5),
    };
    assert_eq!(
        (
            proxy.slow.max_requests,
            proxy.slow.min_rate,
            proxy.slow.response_buffer
        ),
        (256, Some(rate), 64 << 10)
    );
    assert_eq!(proxy.timeouts.head, Duration::from_secs(30));
    let [upstream] = &proxy.upstreams[..] else {
        panic!("{:?}", proxy.upstreams)
    };
    assert_eq!((&*upstream.name, upstream.max_connections), ("app", 1_024));
    assert_eq!(upstream.urls[0].to_string(), "http://127.0.0.1:3000");
    assert!(upstream.when.is_always());
}

#[test]
fn everything_can_be_set() {
    let proxy = proxy(
        "
proxy:
  listen: '[::1]:8000'
  upstreams:
    - {name: api, urls: [http://10.0.0.1:80, http://10.0.0.2:80], when: {path: /api/**, host: [a, b]}, max_connections: 7}
    - {name: app, urls: http://app.internal}
  timeouts: {connect: 2s, head: 1min, idle: 1h, request_head: 5s, keep_alive: 1d, pool: 500ms, upgraded: 2h}
  max_body: 10MB
  max_inspected_body: 4MiB
  error_format: gemini
  max_head: 16KiB
  max_headers: 50
  max_connections: 20
  forwarded: both
  underscores: refuse
  via: edge-1
  max_requests_per_client: 30
  min_rate: {bytes_per_second: 1000, grace: 1s}
  response_buffer: 1MiB
",
    );
    assert_eq!(proxy.upstreams.len(), 2);
    assert_eq!(proxy.upstreams[0].max_connections, 7);
    assert!(!proxy.upstreams[0].when.is_always());
    assert_eq!(proxy.timeouts.connect, Duration::from_secs(2));
    assert_eq!(proxy.timeouts.pool, Duration::from_millis(500));
    assert_eq!(proxy.timeouts.upgraded, Duration::from_secs(7_200));
    assert_eq!(
        (proxy.max_body, proxy.max_head),
        (Some(10_000_000), 16 << 10)
    );
    assert_eq!(proxy.max_inspected_body, 4 << 20);
    assert_eq!(proxy.error_format, ErrorFormat::Gemini);
    assert_eq!((proxy.max_headers, proxy.max_connections), (50, 20));
    assert_eq!(proxy.forwarded, ForwardedHeaders::Both);
    assert_eq!(proxy.heads.underscores, Underscores::Refuse);
    assert_eq!(proxy.heads.via, Via::new("edge-1"));
    assert_eq!(
        (proxy.slow.max_requests, proxy.slow.response_buffer),
        (30, 1 << 20)
    );
    let rate = proxy.slow.min_rate.unwrap();
    assert_eq!(
        (rate.bytes_per_second, rate.grace),
        (1_000, Duration::from_secs(1))
    );
}

#[test]
fn features_can_be_disabled() {
    let proxy = proxy(
        "proxy: {listen: '127.0.0.1:8000', via: off, min_rate: off, response_buffer: 0, upstreams: [{name: app, urls: 'http://h'}]}",
    );
    assert_eq!(proxy.heads.via, None);
    assert_eq!((proxy.slow.min_rate, proxy.slow.response_buffer), (None, 0));
}

#[test]
fn forwarding_underscores_is_a_warning() {
    let text = "proxy: {listen: '127.0.0.1:8000', underscores: pass, upstreams: [{name: app, urls: 'http://h'}]}";
    let warnings = warnings(text);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("underscores-pass: "), "{warnings:?}");
}

#[test]
fn client_bounds_are_validated() {
    for (setting, problem) in [
        ("via: 'a b'", "proxy.via"),
        ("underscores: maybe", "proxy.underscores"),
        (
            "min_rate: {bytes_per_second: 0}",
            "proxy.min_rate.bytes_per_second",
        ),
        ("min_rate: {grace: 0s}", "proxy.min_rate.grace"),
        ("response_buffer: 1GiB", "proxy.response_buffer"),
        (
            "max_requests_per_client: 0",
            "proxy.max_requests_per_client",
        ),
    ] {
        let text = format!(
            "proxy: {{listen: '127.0.0.1:8000', {setting}, upstreams: [{{name: app, urls: 'http://h'}}]}}"
        );
        let mistakes = mistakes(&text);
        assert_eq!(mistakes.len(), 1, "{mistakes:?}");
        assert!(mistakes[0].starts_with(problem), "{mistakes:?}");
    }
}

#[test]
fn every_mistake_is_reported_with_its_line() {
    let text = "
proxy:
  lisen: 127.0.0.1:8000
  upstreams:
    - {name: 'a b', urls: []}
    - {name: app, urls: [ftp://h, http://h/v1]}
    - {name: app, urls: [http://h, http://h], max_connections: 0}
    - {nam: x, when: {ip: 10.0.0.1}}
  timeouts: {head: 1us, ide: 1s, pool: 2d}
  max_head: 1KiB
  max_headers: 0
  forwarded: x-forward
";
    let expected = [
        "proxy.lisen (line 3): unknown key `lisen`; did you mean `listen`?",
        "proxy.upstreams[0].name (line 5): expected a name of 1 to 64 letters, digits, `-`, `_` and `.`, got \"a b\"",
        "proxy.upstreams[0].urls (line 5): must be 1 to 64 URLs, got 0",
        "proxy.upstreams[1].urls[0] (line 6): only http:// and https:// are supported; give a URL such as http://127.0.0.1:3000",
        "proxy.upstreams[1].urls[1] (line 6): a path is not allowed, because the client's path is forwarded \
         unchanged; give a URL such as http://127.0.0.1:3000",
        "proxy.upstreams[2].urls[1] (line 7): is listed twice; remove one of the two",
        "proxy.upstreams[2].max_connections (line 7): must be from 1 to 65536, got 0",
        "proxy.upstreams[3].nam (line 8): unknown key `nam`; did you mean `name`?",
        "proxy.upstreams[3].urls (line 8): is missing; every upstream has a name and at least one URL",
        "proxy.upstreams[3].when.ip (line 8): upstreams are selected by path, host and method; expected one of path, host, method",
        "proxy.timeouts.ide (line 9): unknown key `ide`; did you mean `idle`?",
        "proxy.timeouts.head (line 9): must be 1ms to 1d",
        "proxy.timeouts.pool (line 9): must be 1ms to 1d",
        "proxy.max_head (line 10): must be from 8192 to 1048576, got 1024",
        "proxy.max_headers (line 11): must be from 1 to 1000, got 0",
        "proxy.forwarded (line 12): expected one of x-forwarded, forwarded, both, got \"x-forward\"; did you mean `x-forwarded`?",
    ];
    assert_eq!(mistakes(text), expected);
}

#[test]
fn missing_settings_are_reported() {
    let expected = [
        "proxy.listen (line 1): is missing; name an address and port such as 127.0.0.1:8000",
        "proxy.upstreams (line 1): is missing; give a list of upstreams such as [{name: app, urls: [\"http://127.0.0.1:3000\"]}]",
    ];
    assert_eq!(mistakes("proxy: {}"), expected);
    let text = "proxy: {listen: 8000, upstreams: []}";
    let expected = [
        "proxy.listen (line 1): expected an address and port such as 127.0.0.1:8000, got the number 8000",
        "proxy.upstreams (line 1): must be 1 to 100 upstreams, got 0",
    ];
    assert_eq!(mistakes(text), expected);
    let text = "proxy: {listen: '127.0.0.1:1', upstreams: [{name: a, urls: 'http://h'}, {name: a, urls: 'http://i'}]}";
    let expected = [
        "proxy.upstreams[1] (line 1): another upstream has the name `a`; give each upstream its own name",
    ];
    assert_eq!(mistakes(text), expected);
}

/// After an upstream or URL that cannot be parsed, a duplicate must still be reported on its own
/// line.
#[test]
fn a_duplicate_after_an_invalid_item_is_reported_at_its_own_line() {
    let text = "
proxy:
  listen: 127.0.0.1:1
  upstreams:
    - {name: 'a b', urls: http://h}
    - {name: a, urls: http://i}
    - {name: a, urls: http://j}
    - name: b
      urls:
        - ftp://h
        - http://h
        - http://h
";
    let expected = [
        "proxy.upstreams[0].name (line 5): expected a name of 1 to 64 letters, digits, `-`, `_` and `.`, got \"a b\"",
        "proxy.upstreams[2] (line 7): another upstream has the name `a`; give each upstream its own name",
        "proxy.upstreams[3].urls[0] (line 10): only http:// and https:// are supported; give a URL such as http://127.0.0.1:3000",
        "proxy.upstreams[3].urls[2] (line 12): is listed twice; remove one of the two",
    ];
    assert_eq!(mistakes(text), expected);
}

#[test]
fn outlier_detection_and_health_checks_can_be_configured() {
    let upstream = |settings: &str| {
        let text = format!(
            "proxy: {{listen: '127.0.0.1:1', upstreams: [{{name: a, urls: 'http://h'{settings}}}]}}"
        );
        proxy(&text).upstreams.remove(0)
    };
    let default = upstream("");
    let ejection = default.eject.unwrap();
    assert_eq!(
        (ejection.failures, ejection.time),
        (5, Duration::from_secs(10))
    );
    assert_eq!(default.health, None);
    assert_eq!(upstream(", eject: off").eject, None);
    let set = upstream(
        ", eject: {duration: 1min}, health: {path: '/up?deep', interval: 2s, unhealthy_after: 9}",
    );
    let ejection = set.eject.unwrap();
    assert_eq!(
        (ejection.failures, ejection.time),
        (5, Duration::from_secs(60))
    );
    let health = set.health.unwrap();
    assert_eq!(
        (&*health.path, health.interval, health.timeout),
        ("/up?deep", Duration::from_secs(2), Duration::from_secs(1))
    );
    assert_eq!((health.healthy_after, health.unhealthy_after), (2, 9));
    let text = "proxy: {listen: '127.0.0.1:1', upstreams: [{name: a, urls: 'http://h', eject: {failures: 0, durration: 1s}, health: {path: up}}, {name: b, urls: 'http://i', health: {}}]}";
    let expected = [
        "proxy.upstreams[0].eject.durration (line 1): unknown key `durration`; did you mean `duration`?",
        "proxy.upstreams[0].eject.failures (line 1): must be from 1 to 1000, got 0",
        "proxy.upstreams[0].health.path (line 1): expected a path such as /healthz, got \"up\"",
        "proxy.upstreams[1].health.path (line 1): is missing; name a path such as /healthz",
    ];
    assert_eq!(mistakes(text), expected);
}

#[test]
fn the_access_log_is_configured() {
    let log = |setting: &str| {
        let text = format!(
            "proxy: {{listen: '127.0.0.1:1', upstreams: [{{name: a, urls: 'http://h'}}]{setting}}}"
        );
        proxy(&text).access_log
    };
    assert_eq!(log(""), None);
    let standard = log(", access_log: stdout").unwrap();
    assert_eq!((standard.to, standard.query), (None, false));
    let file = log(", access_log: {to: a.log, query: true}").unwrap();
    assert_eq!((file.to, file.query), (Some("a.log".into()), true));
    assert!(!file.key);
    assert!(log(", access_log: {to: a.log, key: true}").unwrap().key);
    let text = "proxy: {listen: '127.0.0.1:1', upstreams: [{name: a, urls: 'http://h'}], access_log: {query: maybe}}";
    let expected = [
        "proxy.access_log.query (line 1): expected true or false, got \"maybe\"",
        "proxy.access_log.to (line 1): is missing; write stdout or a path",
    ];
    assert_eq!(mistakes(text), expected);
}

#[test]
fn adaptive_limits_can_be_configured() {
    let upstream = |settings: &str| {
        let text = format!(
            "proxy: {{listen: '127.0.0.1:1', upstreams: [{{name: a, urls: 'http://h'{settings}}}]}}"
        );
        proxy(&text).upstreams.remove(0).adaptive
    };
    assert!(upstream("").is_none());
    let default = upstream(", adaptive: {}").unwrap();
    assert_eq!(default.settings, AdaptiveSettings::default());
    assert_eq!(default.headroom, [HeadroomCondition::InFlight(60)]);
    assert_eq!(
        (default.classes.len(), &*default.classes[0].name),
        (1, "default")
    );
    let set = upstream(
        ", adaptive: {algorithm: aimd, max: 9, samples: 5, window: 1s, too_slow: 2s, backoff: 80%, headroom: {in_flight: 40%}, \
         classes: [{name: batch, when: {path: /batch/**, time: '01:00-06:00'}, share: 50%}]}",
    );
    let set = set.unwrap();
    let aimd = Aimd {
        backoff: 80,
        too_slow: Span::from_secs(2),
    };
    let settings = AdaptiveSettings {
        method: Method::Aimd(aimd),
        initial: 9,
        max: 9,
        samples: 5,
        window: Span::from_secs(1),
        ..AdaptiveSettings::default()
    };
    assert_eq!(
        (set.settings, &*set.headroom),
        (settings, &[HeadroomCondition::InFlight(40)][..])
    );
    assert_eq!(
        (&*set.classes[0].name, set.classes[0].share),
        ("batch", SlotShare::new(50).unwrap())
    );
    let gradient = upstream(
        ", adaptive: {tolerance: 200%, queue: 9, smoothing: 50%, min: 30, headroom: {in_flight: 70%, latency: 130%}}",
    );
    let gradient = gradient.unwrap();
    assert_eq!(gradient.settings.initial, 30);
    assert_eq!(
        gradient.headroom,
        [
            HeadroomCondition::InFlight(70),
            HeadroomCondition::Latency(130)
        ]
    );
    let expected = Gradient {
        tolerance: 200,
        queue: 9,
        smoothing: 50,
    };
    assert_eq!(gradient.settings.method, Method::Gradient(expected));
}

#[test]
fn mistakes_in_adaptive_limits_are_reported() {
    let text = "proxy:
  listen: 127.0.0.1:1
  upstreams:
    - name: a
      urls: http://h
      adaptive:
        algorithm: vegas
        min: 0
    - name: b
      urls: http://i
      adaptive:
        algorithm: aimd
        tolerance: 200%
        bakoff: 80%
        max: 2000000
        headroom: {latency: 120%}
    - name: c
      urls: http://j
      adaptive:
        smoothing: 0%
        headroom: {latency: 90%}
        classes:
          - {name: default, when: {path: /x}}
          - {name: d, share: 0%}
          - {name: e, wen: {path: /x}}
    - name: d
      urls: http://k
      adaptive: {headroom: {}}
";
    let expected = [
        "proxy.upstreams[0].adaptive.algorithm (line 7): expected one of gradient, aimd, got \"vegas\"",
        "proxy.upstreams[0].adaptive.min (line 8): must be 1 to 1000000, got 0",
        "proxy.upstreams[1].adaptive.tolerance (line 13): requires `algorithm: gradient`",
        "proxy.upstreams[1].adaptive.bakoff (line 14): unknown key `bakoff`; did you mean `backoff`?",
        "proxy.upstreams[1].adaptive.max (line 15): must be 1 to 1000000, got 2000000",
        "proxy.upstreams[1].adaptive.headroom.latency (line 16): requires `algorithm: gradient`, because `aimd` does not measure the usual latency",
        "proxy.upstreams[2].adaptive.smoothing (line 20): must be 1% to 100%, got 0%",
        "proxy.upstreams[2].adaptive.headroom.latency (line 21): must be 101% to 1000%, not 90%",
        "proxy.upstreams[2].adaptive.classes[0] (line 23): another class has the name `default`; give each class its own name",
        "proxy.upstreams[2].adaptive.classes[1].when (line 24): is missing; every class has a name and conditions (`when`)",
        "proxy.upstreams[2].adaptive.classes[1].share (line 24): must be 1% to 100%",
        "proxy.upstreams[2].adaptive.classes[2].wen (line 25): unknown key `wen`; did you mean `when`?",
        "proxy.upstreams[3].adaptive.headroom (line 28): is empty; set `in_flight`, `latency` or both",
    ];
    assert_eq!(mistakes(text), expected);
}

#[test]
fn unreachable_upstreams_and_unknown_entries_are_warnings() {
    let text = "listen: {http: off, resp: off}
rules: [{name: r, limits: [1/s], elastic: {extra: 50%, when: {headroom.b: 'yes', headroom.c: 'yes'}}}]
proxy:
  listen: 127.0.0.1:1
  upstreams:
    - {name: a, urls: http://h, when: {path: /a/**}}
    - {name: b, urls: http://i, adaptive: {classes: [{name: x, when: {custmer: x}}]}}
    - {name: c, urls: http://j, when: {path: /c/**}}
";
    let warnings = Config::parse(text).unwrap().warnings;
    let warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    let expected = [
        "proxy.upstreams[1].adaptive.classes[0].when.custmer (line 7): no-entry: no request at the proxy has an \
         entry \"custmer\"; expected one of method, path, host, ip, ip.exact, headroom.b, header.NAME, cookie.NAME, \
         query.NAME",
        "proxy.upstreams[2] (line 8): unreachable-upstream: no request reaches `c`, because every request \
         matches `b`, which comes first and has no `when`; move that upstream to the end",
        "proxy.upstreams[2] (line 8): unknown-headroom: a rule uses `headroom.c`, which the proxy provides only for an \
         upstream with `adaptive`; add `adaptive: {}`",
    ];
    assert_eq!(warnings, expected);
    // With the authorization service, Envoy can send any entries in `context_extensions`.
    let warnings = Config::parse(&format!("{text}grpc: {{authorization: true}}\n"));
    let warnings = warnings.unwrap().warnings;
    let unknown = warnings
        .iter()
        .filter(|warning| warning.to_string().contains("custmer"));
    assert_eq!(unknown.count(), 0, "{warnings:?}");
}

#[test]
fn the_proxy_needs_its_own_address() {
    let file = |listen: &str, url: &str| {
        format!("proxy: {{listen: '{listen}', upstreams: [{{name: app, urls: '{url}'}}]}}\n")
    };
    let elsewhere = "http://127.0.0.1:3000";
    assert_eq!(
        mistakes(&file("127.0.0.1:8080", elsewhere)),
        [
            "proxy.listen (line 1): 127.0.0.1:8080 is also the address of listen.http; give each listener its own address"
        ]
    );
    let shut = format!(
        "listen: {{http: off}}\n{}",
        file("127.0.0.1:8080", elsewhere)
    );
    assert_eq!(warnings(&shut), [""; 0]);
    let itself = |at: &str| {
        format!(
            "proxy.upstreams[0] (line 1): own-address: `app` is at {at}, where this proxy itself listens, so \
             requests would loop; set the address of the service behind the proxy"
        )
    };
    for (listen, url, at) in [
        (
            "127.0.0.1:8000",
            "http://127.0.0.1:8000",
            Some("127.0.0.1:8000"),
        ),
        (
            "127.0.0.1:8000",
            "http://localhost:8000",
            Some("localhost:8000"),
        ),
        ("0.0.0.0:80", "http://127.0.0.1", Some("127.0.0.1:80")),
        ("[::]:8000", "http://[::1]:8000", Some("[::1]:8000")),
        ("127.0.0.1:8000", "http://127.0.0.1:8001", None),
        ("127.0.0.1:8000", "http://127.0.0.2:8000", None),
        ("0.0.0.0:8000", "http://10.0.0.1:8000", None),
        ("127.0.0.1:0", "http://127.0.0.1:3000", None),
    ] {
        let expected: Vec<String> = at.map(itself).into_iter().collect();
        assert_eq!(
            warnings(&file(listen, url)),
            expected,
            "{url} behind {listen}"
        );
    }
}
