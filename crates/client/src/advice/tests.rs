use base64::Engine as _;
use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::prelude::*;
use tidegate_core::{
    Algorithm, Charge, Cost, Effect, Limit, Limits, MemoryStore, Rate, RetryAfter, Verdict,
};
use tidegate_tower::{HeaderWriter, Legacy};

use super::*;

/// The current time in the tests: 2023-11-14T22:13:20Z.
const NOW: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

type Lines<'a> = &'a [(&'static str, &'a str)];

fn headers(lines: Lines<'_>) -> HeaderMap {
    let pair = |(name, value): &(&'static str, &str)| {
        (
            HeaderName::from_static(name),
            HeaderValue::from_str(value).unwrap(),
        )
    };
    lines.iter().map(pair).collect()
}

fn advice(status: u16, lines: Lines<'_>) -> Advice {
    Advice::from_response(StatusCode::from_u16(status).unwrap(), &headers(lines), NOW)
}

fn wait_ms(status: u16, lines: Lines<'_>) -> Option<u64> {
    match advice(status, lines).wait? {
        Wait::After(span) => Some(span.as_millis_ceil()),
        Wait::Never => Some(u64::MAX),
    }
}

fn quota(lines: Lines<'_>) -> Option<(u64, u64)> {
    let quota = advice(200, lines).quota?;
    Some((quota.remaining, quota.reset_after.as_millis_ceil()))
}

#[test]
fn retry_after_is_honoured_on_any_status() {
    for status in [200, 301, 404, 413, 429, 500, 503] {
        assert_eq!(wait_ms(status, &[("retry-after", "7")]), Some(7_000));
    }
}

#[test]
fn retry_after_in_its_forms() {
    let cases: &[(Lines<'_>, Option<u64>)] = &[
        (&[("retry-after", " 7 ")], Some(7_000)),
        (&[("retry-after", "0.25")], Some(250)),
        (&[("retry-after", "0")], None),
        (&[("retry-after", "-1")], None),
        (&[("retry-after", "soon")], None),
        (&[("retry-after", "7, 8")], None),
        (&[("retry-after", "99999999999999999999")], None),
        // If the response has no `Date`, the client's clock is used.
        (
            &[("retry-after", "Tue, 14 Nov 2023 22:13:50 GMT")],
            Some(30_000),
        ),
        // The server's clock is an hour ahead, as the `Date` of the response shows.
        (
            &[
                ("date", "Tue, 14 Nov 2023 23:13:20 GMT"),
                ("retry-after", "Tue, 14 Nov 2023 23:13:25 GMT"),
            ],
            Some(5_000),
        ),
        (
            &[("retry-after", "Tuesday, 14-Nov-23 22:13:50 GMT")],
            Some(30_000),
        ),
        (&[("retry-after", "Tue Nov 14 22:13:50 2023")], Some(30_000)),
        (&[("retry-after", "Tue, 14 Nov 2023 22:13:00 GMT")], None),
        (&[("retry-after-ms", "1200")], Some(1_200)),
        (
            &[("retry-after-ms", "1200"), ("retry-after", "2")],
            Some(1_200),
        ),
        (
            &[("retry-after-ms", "5"), ("retry-after", "30")],
            Some(30_000),
        ),
        (&[("retry-after-ms", "5"), ("retry-after", "?")], Some(5)),
        (&[("retry-after", "3"), ("retry-after", "9")], Some(9_000)),
    ];
    for (lines, expected) in cases {
        assert_eq!(wait_ms(503, lines), *expected, "{lines:?}");
    }
}

#[test]
fn every_generation_of_rate_limit() {
    let cases: &[(Lines<'_>, Option<(u64, u64)>)] = &[
        (
            &[
                ("ratelimit-limit", "10, 10;w=1, 50;w=60"),
                ("ratelimit-remaining", "9"),
                ("ratelimit-reset", "36"),
            ],
            Some((9, 36_000)),
        ),
        (
            &[("ratelimit", "limit=100, remaining=50, reset=5")],
            Some((50, 5_000)),
        ),
        (&[("ratelimit", "\"day\";r=50;t=30")], Some((50, 30_000))),
        (
            &[("ratelimit", "\"s\";r=3;t=1, \"d\";r=41210;t=30511")],
            Some((41_210, 30_511_000)),
        ),
        (
            &[
                ("ratelimit", "\"s\";r=0;t=1"),
                ("ratelimit", "\"d\";r=0;t=60"),
            ],
            Some((0, 60_000)),
        ),
        (&[("ratelimit", "day;a=5;w=60;c=1")], Some((5, 60_000))),
        // Remaining bytes are ignored, unless no bytes remain.
        (
            &[
                (
                    "ratelimit-policy",
                    "\"up\";q=9;qu=\"content-bytes\", \"d\";q=9",
                ),
                ("ratelimit", "\"up\";r=1;t=9, \"d\";r=8;t=2"),
            ],
            Some((8, 2_000)),
        ),
        (
            &[
                ("ratelimit-policy", "\"up\";qu=\"content-bytes\""),
                ("ratelimit", "\"up\";r=0;t=9"),
            ],
            Some((0, 9_000)),
        ),
        (&[("ratelimit", "\"d\";r=-1;t=9")], None),
        (&[("ratelimit", "\"d\";t=9")], None),
        (&[("ratelimit", "\"d\";r=9")], None),
        (&[("ratelimit", "\"d\";r=9;t=1.5")], None),
        (&[("ratelimit", "\"d\";r=9;t=999999999999")], None),
        (&[("ratelimit", "\"d\";r=9;t=1;")], None),
        (&[("age", "12"), ("ratelimit", "\"d\";r=0;t=9")], None),
        (
            &[("age", "0"), ("ratelimit", "\"d\";r=0;t=9")],
            Some((0, 9_000)),
        ),
    ];
    for (lines, expected) in cases {
        assert_eq!(quota(lines), *expected, "{lines:?}");
    }
}

#[test]
fn a_reset_is_a_wait_or_an_instant_by_its_size() {
    let reset =
        |value: &str| quota(&[("x-ratelimit-remaining", "3"), ("x-ratelimit-reset", value)]);
    assert_eq!(reset("60"), Some((3, 60_000)));
    assert_eq!(reset("1700000060"), Some((3, 60_000)));
    assert_eq!(reset("1700000000.5"), Some((3, 500)));
    assert_eq!(reset("1700000060000"), Some((3, 60_000)));
    assert_eq!(reset("1600000000"), None, "long past");
    assert_eq!(reset("2023-11-14T22:14:00Z"), None);
    let behind = [
        ("date", "Tue, 14 Nov 2023 22:13:50 GMT"),
        ("x-ratelimit-remaining", "3"),
        ("x-ratelimit-reset", "1700000060"),
    ];
    assert_eq!(quota(&behind), Some((3, 30_000)), "by the server's clock");
    let discord = [
        ("x-ratelimit-remaining", "0"),
        ("x-ratelimit-reset", "1700000060.123"),
        ("x-ratelimit-reset-after", "1.5"),
    ];
    assert_eq!(quota(&discord), Some((0, 1_500)));
}

#[test]
fn the_headers_of_model_providers_are_read() {
    let cases: &[(Lines<'_>, Option<(u64, u64)>)] = &[
        // The example from OpenAI's documentation. Only the limit on requests is returned, because
        // tokens remain.
        (
            &[
                ("x-ratelimit-limit-requests", "60"),
                ("x-ratelimit-limit-tokens", "150000"),
                ("x-ratelimit-remaining-requests", "59"),
                ("x-ratelimit-remaining-tokens", "149984"),
                ("x-ratelimit-reset-requests", "1s"),
                ("x-ratelimit-reset-tokens", "6m0s"),
            ],
            Some((59, 1_000)),
        ),
        (
            &[
                ("x-ratelimit-remaining-requests", "59"),
                ("x-ratelimit-remaining-tokens", "0"),
                ("x-ratelimit-reset-requests", "1s"),
                ("x-ratelimit-reset-tokens", "6m0s"),
            ],
            Some((0, 360_000)),
        ),
        (
            &[
                ("anthropic-ratelimit-requests-limit", "1000"),
                ("anthropic-ratelimit-requests-remaining", "999"),
                ("anthropic-ratelimit-requests-reset", "2023-11-14T22:13:21Z"),
                ("anthropic-ratelimit-tokens-remaining", "80000"),
                ("anthropic-ratelimit-tokens-reset", "2023-11-14T22:14:20Z"),
            ],
            Some((999, 1_000)),
        ),
        (
            &[
                ("date", "Tue, 14 Nov 2023 22:13:50 GMT"),
                ("anthropic-ratelimit-input-tokens-remaining", "0"),
                (
                    "anthropic-ratelimit-input-tokens-reset",
                    "2023-11-15T00:14:20.5+02:00",
                ),
            ],
            Some((0, 30_500)),
        ),
        (
            &[
                ("x-ratelimit-remaining-tokens", "100"),
                ("x-ratelimit-reset-tokens", "6m0s"),
            ],
            None,
        ),
        (
            &[
                ("x-ratelimit-remaining-requests", "0"),
                ("x-ratelimit-reset-requests", "0s"),
            ],
            None,
        ),
        (
            &[
                ("anthropic-ratelimit-requests-remaining", "1"),
                ("anthropic-ratelimit-requests-reset", "soon"),
            ],
            None,
        ),
        (
            &[
                ("anthropic-ratelimit-requests-remaining", "-1"),
                ("anthropic-ratelimit-requests-reset", "2023-11-14T22:13:21Z"),
            ],
            None,
        ),
    ];
    for (lines, expected) in cases {
        assert_eq!(quota(lines), *expected, "{lines:?}");
    }
    let spent = [
        ("x-ratelimit-remaining-tokens", "0"),
        ("x-ratelimit-reset-tokens", "7.2s"),
    ];
    assert_eq!(wait_ms(429, &spent), Some(7_200));
    assert_eq!(wait_ms(200, &spent), None);
}

#[test]
fn no_remaining_quota_is_a_wait_only_after_a_refusal() {
    let spent = [("ratelimit", "\"d\";r=0;t=9")];
    assert_eq!(wait_ms(429, &spent), Some(9_000));
    assert_eq!(wait_ms(503, &spent), Some(9_000));
    assert_eq!(wait_ms(200, &spent), None);
    assert_eq!(
        wait_ms(
            429,
            &[("ratelimit", "\"d\";r=0;t=9"), ("retry-after", "12")]
        ),
        Some(12_000)
    );
    assert_eq!(
        wait_ms(
            429,
            &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "4")]
        ),
        Some(4_000)
    );
}

#[test]
fn grpc_pushback_is_parsed() {
    let pushback = |value| {
        wait_ms(
            200,
            &[("grpc-status", "14"), ("grpc-retry-pushback-ms", value)],
        )
    };
    assert_eq!(pushback("250"), Some(250));
    assert_eq!(pushback("0"), None);
    assert_eq!(pushback("-1"), Some(u64::MAX), "never");
    assert_eq!(pushback("later"), Some(u64::MAX), "never");

    let details = details(1, 500_000_001);
    let delay_ms = |value: &str| {
        wait_ms(
            200,
            &[("grpc-status", "8"), ("grpc-status-details-bin", value)],
        )
    };
    assert_eq!(delay_ms(&details), Some(1_501));
    assert_eq!(delay_ms(details.trim_end_matches('=')), Some(1_501));
    assert_eq!(delay_ms("AAAA"), None);
    assert_eq!(delay_ms("no base 64"), None);
    assert!(is_refusal(
        StatusCode::OK,
        &headers(&[("grpc-status", "8")])
    ));
    assert!(!is_refusal(
        StatusCode::OK,
        &headers(&[("grpc-status", "5")])
    ));
}

/// Encodes `google.rpc.Status{details: [RetryInfo{retry_delay}]}` byte by byte.
fn details(secs: u8, nanos: u32) -> String {
    let url = b"type.googleapis.com/google.rpc.RetryInfo";
    let mut delay = vec![0x08, secs, 0x10];
    prost::encoding::encode_varint(u64::from(nanos), &mut delay);
    let length = |bytes: &[u8]| u8::try_from(bytes.len()).unwrap();
    let info = [&[0x0a, length(&delay)], &*delay].concat();
    let any = [
        &[0x0a, length(url)],
        &url[..],
        &[0x12, length(&info)],
        &info,
    ]
    .concat();
    let status = [&[0x08, 8, 0x1a, length(&any)], &*any].concat();
    base64::engine::general_purpose::STANDARD.encode(status)
}

/// This crate must parse the headers that Tidegate's server writes.
#[test]
fn our_own_headers_are_understood() {
    let minute = Limit::new(Algorithm::TokenBucket {
        capacity: 5,
        refill: Rate {
            count: 5,
            period: Span::from_secs(60),
        },
        mode: tidegate_core::RefillMode::Continuous,
    });
    let second = Limit::new(Algorithm::Gcra {
        rate: Rate {
            count: 10,
            period: Span::from_secs(1),
        },
        burst: 20,
    });
    let limits = Limits::new(vec![minute.unwrap(), second.unwrap()])
        .unwrap()
        .named("api");
    for legacy in [Legacy::Off, Legacy::Delta, Legacy::Epoch] {
        for ratelimit in [true, false] {
            assert_understood(&limits, ratelimit, legacy);
        }
    }
}

fn assert_understood(limits: &Limits, ratelimit: bool, legacy: Legacy) {
    let store = MemoryStore::new(tidegate_core::MemoryBounds::default());
    let mut outcomes = Vec::new();
    for sent in 0..7_u64 {
        let charges = [Charge::new(b"k", limits, Cost::ONE).unwrap()];
        let decision = store.check(&charges, NOW, Effect::Charge, &mut outcomes);
        let verdict = Verdict::of(&decision, &charges, &outcomes);
        let mut headers = HeaderMap::new();
        HeaderWriter::new(ratelimit, legacy).write(&verdict, NOW, &mut headers);
        let status = if verdict.allowed { 200 } else { 429 };
        let read = Advice::from_response(StatusCode::from_u16(status).unwrap(), &headers, NOW);

        let expected = match verdict.retry_after {
            RetryAfter::After(span) if !verdict.allowed => {
                Some(Wait::After(Span::from_secs(span.as_secs_ceil())))
            }
            RetryAfter::After(_) | RetryAfter::Never => None,
        };
        assert_eq!(read.wait, expected, "{headers:?}");
        if ratelimit || legacy != Legacy::Off {
            let quota = read.quota.unwrap();
            assert_eq!(
                quota.remaining,
                5_u64.saturating_sub(sent + 1),
                "{headers:?}"
            );
        }
    }
}

proptest! {
    /// Arbitrary headers never cause a panic, and parsed times are never zero.
    #[test]
    fn arbitrary_headers_never_panic(
        status in 100..1000_u16,
        lines in proptest::collection::vec(
            (
                prop::sample::select(vec![
                    "retry-after", "retry-after-ms", "ratelimit", "ratelimit-policy", "ratelimit-limit",
                    "ratelimit-remaining", "ratelimit-reset", "x-ratelimit-remaining", "x-ratelimit-reset",
                    "x-ratelimit-reset-after", "grpc-retry-pushback-ms", "grpc-status",
                    "grpc-status-details-bin", "date", "age",
                ]),
                prop_oneof![
                    proptest::collection::vec(32..=255_u8, 0..40),
                    "[a-z\"]{1,3}(;[rtaw]=[0-9]{1,16}(\\.[0-9])?){0,3}(, ?\"b\";r=[0-9]{1,3};t=[0-9]{1,3}){0,2}"
                        .prop_map(String::into_bytes),
                    any::<u64>().prop_map(|number| number.to_string().into_bytes()),
                ],
            ),
            0..8,
        ),
    ) {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                headers.append(name, value);
            }
        }
        let advice = Advice::from_response(StatusCode::from_u16(status).unwrap(), &headers, NOW);
        prop_assert_ne!(advice.wait, Some(Wait::After(Span::ZERO)));
        if let Some(quota) = advice.quota {
            prop_assert!(quota.reset_after > Span::ZERO);
        }
    }

    /// From a valid list in the draft's format, the parser returns the tightest item.
    #[test]
    fn a_list_is_parsed_to_its_tightest_item(
        items in proptest::collection::vec((".{0,8}", 1..1_000_000_u64, 1..100_000_u64), 1..6),
    ) {
        let quoted = |name: &str| {
            let plain: String = name.chars().filter(|c| matches!(c, ' '..='~')).collect();
            plain.replace('\\', "\\\\").replace('"', "\\\"")
        };
        let written: Vec<String> =
            items.iter().map(|(name, r, t)| format!("\"{}\";r={r};t={t}", quoted(name))).collect();
        let quota = quota(&[("ratelimit", &written.join(", "))]).unwrap();
        let is_shown = items.iter().any(|(_, r, t)| (*r, *t * 1_000) == quota);
        prop_assert!(is_shown);
        let none_is_tighter = items
            .iter()
            .all(|(_, r, t)| {
                u128::from(*r) * u128::from(quota.1)
                    >= u128::from(quota.0) * u128::from(*t * 1_000)
            });
        prop_assert!(none_is_tighter);
    }
}
