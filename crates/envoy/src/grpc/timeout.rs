//! Call timeouts: the caller's `grpc-timeout`, capped by the listener's maximum.

use std::time::Duration;

use http::HeaderMap;

/// Returns the timeout for a call with these headers, which is at most `most`. An invalid
/// `grpc-timeout` is ignored.
pub(super) fn of(headers: &HeaderMap, most: Duration) -> Duration {
    let requested = headers
        .get("grpc-timeout")
        .and_then(|value| parse(value.as_bytes()));
    requested.map_or(most, |requested| requested.min(most))
}

/// Returns the part of a call's remaining `time` that the store may use. The store may use three
/// quarters of the remaining time, so that enough time remains to apply the fallback policy.
pub(super) fn for_store(time: Duration) -> Duration {
    time - time / 4
}

/// Parses one to eight digits and a time unit, as specified by gRPC over HTTP/2.
fn parse(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if !(1..=8).contains(&digits.len()) || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    // A number of eight digits fits in a `u64`.
    let number = digits
        .iter()
        .fold(0, |number, digit| number * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => Duration::from_secs(number * 3_600),
        b'M' => Duration::from_secs(number * 60),
        b'S' => Duration::from_secs(number),
        b'm' => Duration::from_millis(number),
        b'u' => Duration::from_micros(number),
        b'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_store_timeout_leaves_time_for_the_fallback() {
        let envoys_default = Duration::from_millis(20);
        assert_eq!(for_store(envoys_default), Duration::from_millis(15));
        assert_eq!(for_store(Duration::ZERO), Duration::ZERO);
        assert!(for_store(Duration::MAX) < Duration::MAX);
    }

    #[test]
    fn every_unit_is_parsed_and_invalid_values_are_ignored() {
        for (text, nanos) in [
            ("1H", 3_600_000_000_000),
            ("2M", 120_000_000_000),
            ("99999999S", 99_999_999_000_000_000),
            ("20m", 20_000_000),
            ("0u", 0),
            ("7n", 7),
        ] {
            assert_eq!(
                parse(text.as_bytes()),
                Some(Duration::from_nanos(nanos)),
                "{text}"
            );
        }
        for text in ["", "m", "20", "123456789m", "-1m", "1.5S", "20x", "20ms"] {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn the_caller_may_shorten_the_time_but_not_lengthen_it() {
        let most = Duration::from_secs(10);
        let mut headers = HeaderMap::new();
        assert_eq!(of(&headers, most), most);
        headers.insert("grpc-timeout", http::HeaderValue::from_static("20m"));
        assert_eq!(of(&headers, most), Duration::from_millis(20));
        headers.insert("grpc-timeout", http::HeaderValue::from_static("1H"));
        assert_eq!(of(&headers, most), most);
        headers.insert("grpc-timeout", http::HeaderValue::from_static("soon"));
        assert_eq!(of(&headers, most), most);
    }
}
