//! Tests of general properties: rejected requests are not charged, a decision is atomic, and any
//! string is either a valid configuration or rejected with a reason.

use std::{sync::Arc, thread};

use proptest::prelude::*;
use tidegate_config::envoy::DomainFiles;
use tidegate_envoy::{
    self as envoy, Code, Descriptor, File, HitCounterKind, LimitOverride, MAX_DESCRIPTOR_BYTES,
    MAX_DESCRIPTOR_ENTRIES, MAX_DESCRIPTORS, MAX_DOMAIN_BYTES, RateLimitAnswer, RateLimitRequest,
    RateLimitService, RlsError, Unit, Variables,
};

use crate::{format::ConfigFile, subject::Started};

const TWO: &str = "
domain: two
descriptors:
  - {key: broad, rate_limit: {unit: minute, requests_per_unit: 1000000}}
  - {key: narrow, rate_limit: {unit: hour, requests_per_unit: 100}}";

pub(crate) fn started(text: &str, settings: &[(&str, &str)]) -> Started {
    let variables: Variables = settings
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    let started = Started::new(&variables, 1_700_000_040).unwrap();
    started
        .load(&[ConfigFile {
            name: "two.yaml".into(),
            yaml: text.into(),
        }])
        .unwrap();
    started
}

pub(crate) fn descriptor(key: &str) -> Descriptor {
    Descriptor {
        entries: vec![(key.into(), "x".into())],
        ..Descriptor::default()
    }
}

pub(crate) fn request(descriptors: Vec<Descriptor>) -> RateLimitRequest {
    RateLimitRequest {
        domain: "two".into(),
        descriptors,
        hits_addend: 1,
    }
}

pub(crate) async fn ask(
    service: &RateLimitService,
    request: &RateLimitRequest,
) -> Result<RateLimitAnswer, RlsError> {
    service.should_rate_limit(request).await
}

/// Returns the number of hits counted under `key`, without charging any hits.
pub(crate) async fn counted(service: &RateLimitService, key: &str, limit: u32) -> u32 {
    let asked = Descriptor {
        hits_addend: Some(0),
        ..descriptor(key)
    };
    limit - ask(service, &request(vec![asked])).await.unwrap().statuses[0].limit_remaining
}

#[tokio::test]
async fn invalid_envoy_requests_charge_nothing() {
    let started = started(TWO, &[]);
    let sound = || descriptor("broad");
    let with = |entries| Descriptor {
        entries,
        ..Descriptor::default()
    };
    let long = "x".repeat(MAX_DESCRIPTOR_BYTES);
    let unit = LimitOverride {
        requests_per_unit: 5,
        unit: Unit::Unknown,
    };
    let refused = [
        (
            RateLimitRequest {
                domain: String::new(),
                ..request(vec![sound()])
            },
            "rate limit domain must not be empty",
        ),
        (
            request(Vec::new()),
            "rate limit descriptor list must not be empty",
        ),
        (
            RateLimitRequest {
                domain: "d".repeat(MAX_DOMAIN_BYTES + 1),
                ..request(vec![sound()])
            },
            "domain: 1025 bytes exceed the maximum of 1024",
        ),
        (
            request(vec![sound(); MAX_DESCRIPTORS + 1]),
            "descriptors: 513 descriptors exceed the maximum of 512",
        ),
        (
            request(vec![
                sound(),
                with(vec![("a".into(), "b".into()); MAX_DESCRIPTOR_ENTRIES + 1]),
            ]),
            "descriptors[1].entries: 65 entries exceed the maximum of 64",
        ),
        (
            request(vec![sound(), with(vec![("a".into(), long)])]),
            "descriptors[1].entries: 65537 bytes of keys and values exceed the maximum of 65536",
        ),
        (
            request(vec![
                sound(),
                Descriptor {
                    limit: Some(unit),
                    ..sound()
                },
            ]),
            "descriptors[1].limit.unit: is not a unit of time; use one of SECOND, MINUTE, HOUR, DAY, WEEK, MONTH, YEAR",
        ),
    ];
    for (request, expected) in &refused {
        let error = ask(&started.service, request).await.unwrap_err();
        assert_eq!(error.to_string(), *expected);
    }
    assert_eq!(
        started.service.errors(),
        u64::try_from(refused.len()).unwrap()
    );
    assert_eq!(counted(&started.service, "broad", 1_000_000).await, 0);
    let largest = ask(&started.service, &request(vec![sound(); MAX_DESCRIPTORS]))
        .await
        .unwrap();
    assert_eq!(largest.statuses.len(), MAX_DESCRIPTORS);
    assert_eq!(counted(&started.service, "broad", 1_000_000).await, 512);
}

#[tokio::test]
async fn the_envoy_service_without_a_configuration_returns_errors() {
    let started = Started::new(&Variables::new(), 0).unwrap();
    let error = ask(&started.service, &request(vec![descriptor("broad")]))
        .await
        .unwrap_err();
    assert_eq!(error, RlsError::NoConfiguration);
    started.load(&[]).unwrap();
    let answer = ask(&started.service, &request(vec![descriptor("broad")]))
        .await
        .unwrap();
    assert_eq!(
        answer.overall_code,
        Code::Ok,
        "a configuration without a domain limits nothing"
    );
}

/// If the limit has one remaining request, only one of two concurrent requests is admitted.
/// envoyproxy/ratelimit can admit both, because it checks first and charges afterwards.
#[tokio::test]
async fn envoy_stop_increment_is_one_decision() {
    let started = started(TWO, &[("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true")]);
    let passed: u32 = thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| ask_often(&started.service, 200)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    assert_eq!(passed, 100);
    assert_eq!(
        counted(&started.service, "broad", 1_000_000).await,
        100,
        "the denied hits were not charged"
    );
}

fn ask_often(service: &Arc<RateLimitService>, times: u32) -> u32 {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let request = request(vec![descriptor("broad"), descriptor("narrow")]);
    let ask = |_: &u32| {
        let answer = runtime
            .block_on(service.should_rate_limit(&request))
            .unwrap();
        answer.overall_code == Code::Ok
    };
    u32::try_from((0..times).filter(ask).count()).unwrap()
}

/// With `detailed_metric`, values from requests become part of metric labels. Clients choose the
/// label values, so they must not be able to exhaust memory.
#[tokio::test]
async fn envoy_metrics_are_bounded() {
    let text = "domain: two\ndescriptors: [{key: k, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 1}}]";
    let started = started(text, &[]);
    for number in 0..5_000 {
        let entries = vec![("k".to_owned(), number.to_string())];
        ask(
            &started.service,
            &request(vec![Descriptor {
                entries,
                ..Descriptor::default()
            }]),
        )
        .await
        .unwrap();
        let domain = format!("unknown{number}");
        ask(
            &started.service,
            &RateLimitRequest {
                domain,
                ..request(vec![descriptor("k")])
            },
        )
        .await
        .unwrap();
    }
    let (mut paths, mut hits, mut domains) = (0, 0, 0);
    started.service.for_each_counter(|_, _, counter, count| {
        if counter == HitCounterKind::TotalHits {
            paths += 1;
            hits += count;
        }
    });
    started.service.for_each_unknown_domain(|_, _| domains += 1);
    assert_eq!((paths, hits, domains), (4_097, 5_000, 257));
}

/// A request with a new path or domain locks the map of counters. The request must not have to wait
/// until a metrics page has been written.
#[test]
fn envoy_requests_do_not_wait_for_a_reader_of_the_metrics() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _entered = runtime.enter();
    let text = "domain: two\ndescriptors: [{key: k, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 1}}]";
    let started = started(text, &[]);
    let send = |domain: &str, value: &str| {
        let entries = vec![("k".to_owned(), value.to_owned())];
        let descriptor = Descriptor {
            entries,
            ..Descriptor::default()
        };
        let request = RateLimitRequest {
            domain: domain.to_owned(),
            ..request(vec![descriptor])
        };
        runtime.block_on(ask(&started.service, &request)).unwrap();
    };
    send("two", "first");
    send("unknown", "first");
    let mut read = 0;
    started.service.for_each_counter(|_, path, _, _| {
        send("two", &format!("after {path}"));
        read += 1;
    });
    started.service.for_each_unknown_domain(|domain, _| {
        send(&format!("after {domain}"), "first");
        read += 1;
    });
    assert_eq!(read, HitCounterKind::ALL.len() + 1);
    assert_eq!(started.service.domain_not_found("after unknown"), 1);
}

#[tokio::test]
async fn envoy_metric_paths_are_bounded() {
    let text = "domain: two\ndescriptors: [{key: k, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 1}}]";
    let started = started(text, &[]);
    let long = Descriptor {
        entries: vec![("k".to_owned(), "x".repeat(10_000))],
        ..Descriptor::default()
    };
    ask(&started.service, &request(vec![long])).await.unwrap();
    let mut longest = 0;
    started
        .service
        .for_each_counter(|_, path, _, _| longest = longest.max(path.len()));
    assert!((1..1_000).contains(&longest), "{longest}");
}

/// Generates fragments of valid and invalid configurations.
fn piece() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "domain: d\n",
        "descriptors:\n",
        "  - ",
        "    ",
        "key: k\n",
        "value: v*\n",
        "value: 1.5\n",
        "rate_limit: ",
        "rate_limits: ",
        "{unit: day, requests_per_unit: 1}\n",
        "{unlimited: true}\n",
        "[5/s, {window: 30s}]\n",
        "[",
        "]",
        "{",
        "}",
        "algorithm: gcra\n",
        "replaces: [{name: n}]\n",
        "share_threshold: yes\n",
        "metadata: {a: [1, {b: ~}]}\n",
        "&a ",
        "*a\n",
        "<<: *a\n",
        "---\n",
        "- x\n",
        ": ",
        "'",
        "\"",
        "\n",
        "\u{feff}",
        "é",
        "!!str ",
        "| \n",
        "anchor: {calendar: month}\n",
        "0x1f: ",
        "all_or_nothing: true\n",
    ])
}

proptest! {
    #[test]
    fn any_text_is_a_configuration_or_an_error(pieces in prop::collection::vec(piece(), 0..40)) {
        let file = |name: &str, text: String| File { name: name.into(), text };
        let files = vec![file("a.yaml", pieces.concat()), file("b.yaml", "domain: b".into())];
        for merging in [DomainFiles::One, DomainFiles::Merged] {
            if let Err(mistakes) = envoy::read(files.clone(), merging) {
                prop_assert!(!mistakes.is_empty());
                prop_assert!(mistakes.iter().all(|mistake| mistake.to_string().starts_with("a.yaml: ")));
            }
        }
    }
}
