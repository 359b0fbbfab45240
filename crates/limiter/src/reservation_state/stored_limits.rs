//! The limits of charges, in the form in which they are stored with a reservation. Another server
//! may have other limits for the same key, and it does not know the limits of counters, which
//! belong to no rule.
//!
//! ```text
//!   | flags: 1 | limit | …
//!
//!   limit: | algorithm: 1 | flags: 1 | soft percent: 8 | parameters of the algorithm: 8 each |
//! ```

use std::{cell::RefCell, sync::Arc};

use tidegate_core::{
    Algorithm, AlgorithmName, Anchor, Calendar, CalendarUnit, Counting, Limit, LimitSpec, Limits,
    Rate, RefillMode, Span, Window,
};

use super::reservation_reader::ReservationReader;
use crate::BuildCache;

/// The number of decoded limits that each thread caches.
const CACHED_LIMITS: usize = 64;

thread_local! {
    // Most tokens contain the limits of a few rules. Decoding builds the limits, which would take a
    // fifth of a settlement.
    static DECODED: RefCell<BuildCache<Box<[u8]>, Arc<Limits>>> =
        RefCell::new(BuildCache::new(CACHED_LIMITS));
}

/// The flag of limits in shadow mode.
const IN_SHADOW: u8 = 1;
/// The flag of limits that do not count denied requests, whatever their own flags are.
const SKIPS_DENIALS: u8 = 2;

/// The flag of a limit that counts denied requests.
const COUNTS_DENIED: u8 = 1;
/// The flag of a limit that counts denied requests at their full cost.
const COUNTS_IN_FULL: u8 = 2;

/// Appends the encoded `limits` to `bytes`.
pub(crate) fn encode_to(bytes: &mut Vec<u8>, limits: &Limits) {
    bytes.push(flag(limits.is_shadow(), IN_SHADOW) | flag(limits.skips_denials(), SKIPS_DENIALS));
    for limit in limits.iter() {
        push_limit(bytes, limit);
    }
}

/// Decodes limits, or returns them from the cache; `None` if they have another format.
pub(crate) fn decode_cached(bytes: &[u8]) -> Option<Arc<Limits>> {
    DECODED.with_borrow_mut(|cache| {
        let built = cache.get_or_build(bytes.into(), |bytes| decode(bytes).map(Arc::new).ok_or(()));
        built.ok().cloned()
    })
}

/// Decodes limits; `None` if they have another format.
pub(crate) fn decode(bytes: &[u8]) -> Option<Limits> {
    let mut input = ReservationReader(bytes);
    let flags = byte(&mut input)?;
    let mut list = Vec::new();
    while !input.is_empty() {
        list.push(take_limit(&mut input)?);
    }
    let limits = Limits::new(list).ok()?.in_shadow(flags & IN_SHADOW != 0);
    Some(if flags & SKIPS_DENIALS == 0 {
        limits
    } else {
        limits.without_counting_denials()
    })
}

fn flag(is_set: bool, flag: u8) -> u8 {
    if is_set { flag } else { 0 }
}

fn push_limit(bytes: &mut Vec<u8>, limit: &Limit) {
    let tag = match limit.algorithm() {
        Algorithm::Gcra { .. } => 1,
        Algorithm::TokenBucket { .. } => 2,
        Algorithm::LeakyBucket { .. } => 3,
        Algorithm::FixedWindow { .. } => 4,
        Algorithm::SlidingWindowLog { .. } => 5,
        Algorithm::Concurrency { .. } => 6,
        Algorithm::SlidingWindowCounter { .. } => 7,
    };
    let flags =
        flag(limit.count_denied(), COUNTS_DENIED) | flag(limit.counts_in_full(), COUNTS_IN_FULL);
    bytes.extend_from_slice(&[tag, flags]);
    push(bytes, &[limit.soft_percent().into()]);
    match limit.algorithm() {
        Algorithm::Gcra { rate, burst } => push(bytes, &[*burst, rate.count, period(*rate)]),
        Algorithm::TokenBucket {
            capacity,
            refill,
            mode,
        } => {
            let is_interval = *mode == RefillMode::Interval;
            let numbers = [*capacity, refill.count, period(*refill), is_interval.into()];
            push(bytes, &numbers);
        }
        Algorithm::LeakyBucket {
            capacity,
            leak,
            queue,
        } => push(
            bytes,
            &[*capacity, leak.count, period(*leak), (*queue).into()],
        ),
        Algorithm::FixedWindow { limit, window } => {
            push(bytes, &[*limit]);
            push_window(bytes, window);
        }
        Algorithm::SlidingWindowLog {
            limit,
            window: span,
        }
        | Algorithm::Concurrency { limit, lease: span } => push(bytes, &[*limit, span.as_micros()]),
        Algorithm::SlidingWindowCounter {
            limit,
            window,
            counting,
        } => {
            // A counter without sub-windows is weighted.
            let (buckets, strict) = match counting {
                Counting::Weighted => (0, false),
                Counting::Buckets { buckets, strict } => (*buckets, *strict),
            };
            let numbers = [*limit, window.as_micros(), buckets.into(), strict.into()];
            push(bytes, &numbers);
        }
    }
}

fn push_window(bytes: &mut Vec<u8>, window: &Window) {
    match window {
        Window::Epoch(span) => push(bytes, &[0, span.as_micros()]),
        Window::FirstRequest(span) => push(bytes, &[1, span.as_micros()]),
        Window::Calendar(calendar) => {
            let (unit, zone) = (calendar.unit().as_str(), calendar.zone());
            let day = u64::from(calendar.day().unsigned_abs());
            push(bytes, &[2, day]);
            for text in [unit, zone] {
                push(bytes, &[text.len() as u64]);
                bytes.extend_from_slice(text.as_bytes());
            }
        }
    }
}

fn period(rate: Rate) -> u64 {
    rate.period.as_micros()
}

fn push(bytes: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        bytes.extend_from_slice(&number.to_be_bytes());
    }
}

fn take_limit(input: &mut ReservationReader<'_>) -> Option<Limit> {
    let (tag, flags, soft) = (byte(input)?, byte(input)?, input.number()?);
    let spec = LimitSpec {
        soft: Some(u32::try_from(soft).ok()?),
        count_denied: Some(flags & COUNTS_DENIED != 0),
        ..take_algorithm(input, tag)?
    };
    let limit = spec.build().ok()?;
    if flags & COUNTS_IN_FULL == 0 {
        return Some(limit);
    }
    limit.counting_in_full().ok()
}

fn take_algorithm(input: &mut ReservationReader<'_>, tag: u8) -> Option<LimitSpec> {
    let mut spec = LimitSpec::default();
    match tag {
        1 => {
            spec.algorithm = Some(AlgorithmName::Gcra);
            spec.burst = Some(input.number()?);
            spec.rate = Some(take_rate(input)?);
        }
        2 => {
            spec.algorithm = Some(AlgorithmName::TokenBucket);
            spec.capacity = Some(input.number()?);
            spec.refill = Some(take_rate(input)?);
            spec.refill_mode = Some(match input.number()? {
                0 => RefillMode::Continuous,
                _ => RefillMode::Interval,
            });
        }
        3 => {
            spec.algorithm = Some(AlgorithmName::LeakyBucket);
            spec.capacity = Some(input.number()?);
            spec.leak = Some(take_rate(input)?);
            spec.queue = Some(input.number()? != 0);
        }
        4 => {
            spec.algorithm = Some(AlgorithmName::FixedWindow);
            spec.limit = Some(input.number()?);
            (spec.window, spec.anchor) = take_window(input)?;
        }
        5 => {
            spec.algorithm = Some(AlgorithmName::SlidingWindowLog);
            spec.limit = Some(input.number()?);
            spec.window = Some(take_span(input)?);
        }
        6 => {
            spec.algorithm = Some(AlgorithmName::Concurrency);
            spec.limit = Some(input.number()?);
            spec.lease = Some(take_span(input)?);
        }
        7 => {
            spec.algorithm = Some(AlgorithmName::SlidingWindowCounter);
            spec.limit = Some(input.number()?);
            spec.window = Some(take_span(input)?);
            let (buckets, strict) = (input.number()?, input.number()?);
            if buckets > 0 {
                spec.buckets = Some(u32::try_from(buckets).ok()?);
                spec.strict = Some(strict != 0);
            }
        }
        _ => return None,
    }
    Some(spec)
}

fn take_window(input: &mut ReservationReader<'_>) -> Option<(Option<Span>, Option<Anchor>)> {
    let (kind, number) = (input.number()?, input.number()?);
    let span = Some(Span::from_micros(number));
    Some(match kind {
        0 => (span, Some(Anchor::Epoch)),
        1 => (span, Some(Anchor::FirstRequest)),
        2 => {
            let unit = take_text(input)?;
            let mut units = CalendarUnit::ALL.into_iter();
            let (_, unit) = units.find(|(name, _)| *name == unit)?;
            let (zone, day) = (take_text(input)?, i8::try_from(number).ok()?);
            let calendar = Calendar::new(unit, zone, Some(day)).ok()?;
            (None, Some(Anchor::Calendar(calendar)))
        }
        _ => return None,
    })
}

fn take_rate(input: &mut ReservationReader<'_>) -> Option<Rate> {
    Some(Rate {
        count: input.number()?,
        period: take_span(input)?,
    })
}

fn take_span(input: &mut ReservationReader<'_>) -> Option<Span> {
    Some(Span::from_micros(input.number()?))
}

fn take_text<'b>(input: &mut ReservationReader<'b>) -> Option<&'b str> {
    let length = usize::try_from(input.number()?).ok()?;
    std::str::from_utf8(input.take(length)?).ok()
}

fn byte(input: &mut ReservationReader<'_>) -> Option<u8> {
    input.take(1)?.first().copied()
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, mem::discriminant};

    use tidegate_config::Config;

    use super::*;

    const RULES: &str = "
rules:
  - {name: gcra, limits: [{algorithm: gcra, rate: 7/s, burst: 3, soft: 10%}]}
  - {name: token_bucket, limits: [{algorithm: token_bucket, capacity: 9, refill: 5/min}]}
  - name: interval
    limits: [{algorithm: token_bucket, capacity: 9, refill: 5/min, refill_mode: interval}]
  - {name: meter, limits: [{algorithm: leaky_bucket, capacity: 9, leak: 5/min}]}
  - {name: queue, limits: [{algorithm: leaky_bucket, capacity: 9, leak: 5/min, queue: true}]}
  - {name: window, limits: [{algorithm: fixed_window, limit: 9, window: 1h, count_denied: true}]}
  - {name: first, limits: [{algorithm: fixed_window, limit: 9, window: 1h, anchor: first_request}]}
  - name: month
    limits:
      - {algorithm: fixed_window, limit: 9, anchor: {calendar: month, zone: Europe/Berlin, day: 31}}
  - {name: logs, limits: [5/s, 20/min, 200/h]}
  - {name: slots, limits: [{algorithm: concurrency, limit: 3, lease: 30s}]}
  - {name: weighted, limits: [{algorithm: sliding_window_counter, limit: 9, window: 1min}]}
  - name: buckets
    limits:
      - {algorithm: sliding_window_counter, limit: 9, window: 1min, buckets: 6, strict: false}
";

    fn encode(limits: &Limits) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode_to(&mut bytes, limits);
        bytes
    }

    fn assert_same(limits: &Limits) {
        let encoded = encode(limits);
        let decoded = decode(&encoded).unwrap();
        let lists = [limits, &decoded].map(|limits| limits.iter().cloned().collect::<Vec<_>>());
        assert_eq!(lists[0], lists[1]);
        assert_eq!(decoded.is_shadow(), limits.is_shadow());
        assert_eq!(decoded.skips_denials(), limits.skips_denials());
        for length in 0..encoded.len() {
            // A part of the bytes may contain the first limits.
            let part = decode(&encoded[..length]);
            assert!(part.is_none_or(|part| part.len() < limits.len()));
        }
    }

    #[test]
    fn equal_limits_are_decoded_once() {
        let limits = ["10/min", "11/min"].map(|text| {
            let limits = Limits::new(vec![text.parse().unwrap()]).unwrap();
            decode_cached(&encode(&limits)).unwrap()
        });
        for limits in &limits {
            let again = decode_cached(&encode(limits)).unwrap();
            assert!(Arc::ptr_eq(&again, limits));
        }
        assert!(!limits[0].iter().eq(limits[1].iter()));
        assert!(decode_cached(b"").is_none());
    }

    #[test]
    fn limits_survive_a_round_trip() {
        let rules = Config::parse(RULES).unwrap().rules;
        let limits = rules.iter().flat_map(|rule| rule.limits().iter());
        let algorithms: HashSet<_> = limits
            .map(|limit| discriminant(limit.algorithm()))
            .collect();
        assert_eq!(
            algorithms.len(),
            AlgorithmName::ALL.len(),
            "a rule for each"
        );
        for rule in rules.iter() {
            let limits = rule.limits();
            assert_same(limits);
            assert_same(&limits.without_counting_denials());
            assert_same(&limits.counting_all());
            assert_same(&Limits::clone(limits).in_shadow(true));
        }
    }

    #[test]
    fn an_unknown_algorithm_is_rejected() {
        let rules = Config::parse(RULES).unwrap().rules;
        let mut encoded = encode(rules.rule("window").unwrap().limits());
        encoded[1] = 8;
        assert!(decode(&encoded).is_none());
        assert!(decode(&[]).is_none());
    }
}
