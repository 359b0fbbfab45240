//! Tests of the quota registry: streams and their assignments.

use tidegate_core::Span;

use super::*;

const NOW: Timestamp = Timestamp::from_micros(1_700_000_040_000_000);

fn rules(rates: &[(&str, u64)]) -> Vec<QuotaRule> {
    let rule = |(domain, seconds): &(&str, u64)| QuotaRule {
        name: (*domain).into(),
        domain: (*domain).into(),
        bucket: Vec::new(),
        limit: QuotaLimit {
            requests: 100,
            period: Span::from_secs(*seconds),
        },
    };
    rates.iter().map(rule).collect()
}

fn quotas(rates: &[(&str, u64)]) -> Quotas {
    let quotas = Quotas::default();
    quotas.swap_rules(rules(rates), NOW);
    quotas
}

fn used_one(name: &str) -> Vec<(BucketId, Usage)> {
    let id = BucketId::from([("id".to_owned(), name.to_owned())]);
    vec![(
        id,
        Usage {
            allowed: 1,
            denied: 0,
            ..Usage::default()
        },
    )]
}

#[test]
fn only_budgets_wait_for_windows() {
    let quotas = quotas(&[("rate", 1), ("minute", 60), ("hour", 3_600)]);
    let (stream, _inbox) = quotas.add_stream();
    assert_eq!(quotas.next_window(stream), None);
    quotas.report(stream, "rate", used_one("a"), NOW);
    assert_eq!(quotas.next_window(stream), None, "a rate has no window");
    quotas.report(stream, "hour", used_one("a"), NOW);
    quotas.report(stream, "minute", used_one("a"), NOW);
    let minute = NOW.after(Span::from_secs(60));
    assert_eq!(quotas.next_window(stream), Some(minute));
    quotas.roll(stream, minute);
    assert_eq!(
        quotas.next_window(stream),
        Some(minute.after(Span::from_secs(60)))
    );
}

#[test]
fn usage_of_a_bucket_survives_its_streams_until_the_window_ends() {
    let quotas = quotas(&[("rate", 1), ("hour", 3_600)]);
    let (stream, _inbox) = quotas.add_stream();
    quotas.report(stream, "rate", used_one("a"), NOW);
    quotas.report(stream, "hour", used_one("a"), NOW);
    quotas.remove_stream(stream, NOW);
    let count = |buckets, streams| QuotaCounts { buckets, streams };
    assert_eq!(
        quotas.counts(),
        count(1, 0),
        "the usage of a rate is not kept"
    );
    let (stream, _inbox) = quotas.add_stream();
    quotas.report(stream, "hour", used_one("b"), NOW);
    assert_eq!(quotas.counts(), count(2, 1));
    quotas.report(
        stream,
        "hour",
        used_one("c"),
        NOW.after(Span::from_secs(3_600)),
    );
    assert_eq!(
        quotas.counts(),
        count(2, 1),
        "the usage of the ended hour is removed"
    );
}

/// When a reload removes a quota, every stream that used it is notified immediately and removed
/// from the quota's buckets.
#[test]
fn a_removed_quota_allows_all_at_once() {
    let quotas = quotas(&[("rate", 1), ("hour", 3_600)]);
    let mut streams = [(); 2].map(|()| quotas.add_stream());
    for (stream, inbox) in &mut streams {
        quotas.report(*stream, "rate", used_one("a"), NOW);
        quotas.report(*stream, "hour", used_one("a"), NOW);
        while inbox.try_recv().is_ok() {}
    }
    while streams[0].1.try_recv().is_ok() {}
    quotas.swap_rules(Vec::new(), NOW);
    for (stream, inbox) in &mut streams {
        let assignments = inbox.try_recv().unwrap();
        let assignments: Vec<_> = assignments
            .iter()
            .map(|(_, assignment)| *assignment)
            .collect();
        assert_eq!(assignments, [Some(Assignment::AllowAll); 2]);
        assert!(inbox.try_recv().is_err(), "nothing else is sent");
        assert_eq!(quotas.next_window(*stream), None);
    }
    let count = |buckets, streams| QuotaCounts { buckets, streams };
    assert_eq!(
        quotas.counts(),
        count(1, 2),
        "the usage of the hour is kept in case its quota returns"
    );
    // The bucket no longer has any streams, so the next stream gets the whole limit.
    quotas.swap_rules(rules(&[("rate", 1)]), NOW);
    let (stream, inbox) = &mut streams[0];
    quotas.report(*stream, "rate", used_one("a"), NOW);
    let share = Assignment::Rate {
        requests: 100,
        period: Span::from_secs(1),
    };
    assert_eq!(inbox.try_recv().unwrap()[0].1, Some(share));
}

#[test]
fn a_changed_limit_is_sent_at_once() {
    let quotas = quotas(&[("rate", 1)]);
    let (stream, mut inbox) = quotas.add_stream();
    quotas.report(stream, "rate", used_one("a"), NOW);
    inbox.try_recv().unwrap();
    quotas.swap_rules(rules(&[("rate", 2)]), NOW);
    let share = Assignment::Rate {
        requests: 100,
        period: Span::from_secs(2),
    };
    assert_eq!(inbox.try_recv().unwrap()[0].1, Some(share));
    quotas.swap_rules(rules(&[("rate", 2)]), NOW);
    assert!(inbox.try_recv().is_err(), "nothing has changed");
    quotas.swap_rules(rules(&[("rate", 60)]), NOW);
    let granted = inbox.try_recv().unwrap()[0].1;
    assert!(
        matches!(granted, Some(Assignment::Budget { .. })),
        "{granted:?}"
    );
    assert_eq!(
        quotas.next_window(stream),
        Some(NOW.after(Span::from_secs(60)))
    );
}

#[test]
fn the_number_of_buckets_of_a_stream_is_bounded() {
    let quotas = quotas(&[("shop", 60)]);
    let (stream, mut inbox) = quotas.add_stream();
    let all = (0..=MAX_STREAM_BUCKETS).flat_map(|number| used_one(&number.to_string()));
    quotas.report(stream, "shop", all.collect(), NOW);
    let assigned = inbox.try_recv().unwrap();
    let abandoned = assigned
        .iter()
        .filter(|(_, assignment)| assignment.is_none());
    assert_eq!(
        (assigned.len(), abandoned.count()),
        (MAX_STREAM_BUCKETS + 1, 1)
    );
}
