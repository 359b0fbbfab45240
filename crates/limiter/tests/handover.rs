//! Moves the state of a limiter to another one, as in an upgrade.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use futures_util::FutureExt as _;
use tidegate::{Clock, rate_limiter::SlotTurn};
use tidegate_config::{Config, ReservationsConfig};
use tidegate_core::{
    Charge, Cost, Effect, EntryBlock, EntryBlockTarget, MemoryBounds, MemoryStore, Override,
    OverrideTarget, Replacement, Request, RetryAfter, Scratch, Span, Timestamp, Verdict,
};
use tidegate_limiter::{
    HandoverError, ServerLimiter,
    overrides::OverrideFilter,
    reservations::{CounterCharge, CounterSettlement, Reservation, ReservationError, Reservations},
};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
const HOUR: Span = Span::from_secs(3_600);
const RULES: &str = "rules: [{name: api, limits: [5/h], algorithm: sliding_window_log}]";

fn limiter(now: Timestamp) -> ServerLimiter {
    let rules = Config::parse(RULES).unwrap().rules;
    let store = MemoryStore::new(MemoryBounds::default());
    let reservations = Reservations::new(ReservationsConfig::default(), None).unwrap();
    ServerLimiter::new(rules, store, Clock::manual(now)).with_reservations(reservations)
}

/// Reserves `cost` units for an hour. Returns the token, or the time after which a retry is
/// admitted.
fn reserve(limiter: &ServerLimiter, cost: u64) -> Result<String, RetryAfter> {
    let request = Request::new(&[], Cost::new(cost).unwrap()).unwrap();
    let (rules, mut scratch) = (limiter.rules(), Scratch::default());
    let turn = SlotTurn::at_once();
    let finish = |_: &_, verdict: &Verdict<'_>, reservation: Option<Reservation>| {
        let retry_after = verdict.leading().unwrap().outcome.retry_after;
        reservation
            .map(|reservation| reservation.token)
            .ok_or(retry_after)
    };
    let reserved = limiter.reserve(&rules, &mut scratch, &request, HOUR, turn, finish);
    reserved.now_or_never().unwrap().unwrap()
}

fn hand_over(old: &ServerLimiter, new: &ServerLimiter) -> Result<(), HandoverError> {
    let mut records = Vec::new();
    old.send_state(&mut |tag, record| {
        records.push((tag, record.to_vec()));
        Ok(())
    })?;
    new.begin_taking_state();
    for (tag, record) in records {
        new.take_state(tag, &record)?;
    }
    new.end_taking_state()
}

/// The wall clock was set forward or back by an hour while the old process was running, or was not
/// stepped.
#[test]
fn a_step_of_the_wall_clock_shifts_no_deadline() {
    for wall_clock in [START, START.after(HOUR), START.before(HOUR)] {
        let (old, new) = (limiter(START), limiter(wall_clock));
        let token = reserve(&old, 3).unwrap();
        let later = START.after(Span::from_secs(60));
        old.clock().set(later);
        new.clock().set(wall_clock.after(Span::from_secs(60)));
        reserve(&old, 2).unwrap();
        hand_over(&old, &new).unwrap();
        assert_eq!(new.now(), later);
        let is_stepped = wall_clock != START;
        let started = if is_stepped { later } else { START };
        assert_eq!(new.metrics().started(), started);
        let wait = Span::from_secs(3_600 - 60);
        assert_eq!(reserve(&new, 1), Err(RetryAfter::After(wait)));
        let settled = new.settle_reservation(&token, 1).now_or_never().unwrap();
        assert_eq!(settled.unwrap().released, 2);
        new.clock().set(later.after(wait));
        reserve(&new, 3).unwrap();
    }
}

/// The rule of an override may no longer exist, or may have another key.
#[test]
fn overrides_without_their_rule_move() {
    let (old, new) = (limiter(START), limiter(START));
    for (rule, values) in [
        ("former", &["alice"][..]),
        ("api", &["alice", "x"]),
        ("api", &[]),
    ] {
        let found = Override {
            replacement: Replacement::Factor("2x".parse().unwrap()),
            until: None,
            reason: "launch".into(),
        };
        let target = OverrideTarget::of(values);
        old.overrides().set(rule, &target, found, START).unwrap();
    }
    hand_over(&old, &new).unwrap();
    let listed = |limiter: &ServerLimiter| {
        let filter = OverrideFilter {
            most: 10,
            ..OverrideFilter::default()
        };
        let page = limiter.list_overrides(&limiter.rules(), filter).unwrap();
        let listed = page.overrides.into_iter();
        listed
            .map(|found| (found.rule, found.target, found.inactive))
            .collect::<Vec<_>>()
    };
    assert_eq!(listed(&new).len(), 3);
    assert_eq!(listed(&new), listed(&old));
}

/// Counters belong to no rule, so the other process receives their limits with the reservation.
#[test]
fn reservations_of_counters_move() {
    let (old, new) = (limiter(START), limiter(START));
    let rules = old.rules();
    let limits = rules.rule("api").unwrap().limits();
    let charge = CounterCharge {
        key: b"counter".as_slice().into(),
        limits: Arc::clone(limits),
        cost: Cost::new(2).unwrap(),
    };
    let tokens = [(); 2].map(|()| {
        let reserved = old.reserve_counters(std::slice::from_ref(&charge), HOUR, None);
        let reserved = reserved.now_or_never().unwrap().unwrap();
        reserved.reservation.unwrap().token
    });
    hand_over(&old, &new).unwrap();
    // The old process must not settle a reservation that the new process would settle again.
    let limits_of = |_: &[u8]| Some(Arc::clone(limits));
    let settled = old.settle_counters(&tokens[0], limits_of, 1).now_or_never();
    assert_eq!(settled.unwrap(), Err(ReservationError::Moved));
    let left = || {
        let charge = Charge::new(b"counter", limits, Cost::ONE).unwrap();
        let inspected = new.inspect(charge, Effect::Look).now_or_never();
        inspected.unwrap().unwrap()[0].remaining
    };
    assert_eq!(left(), 1);
    let settled = new.settle_counters(&tokens[0], limits_of, 1).now_or_never();
    let settled = settled.unwrap().unwrap();
    assert!(
        matches!(settled, CounterSettlement::Settled(_)),
        "{settled:?}"
    );
    assert_eq!(left(), 2);
    // The window of the log is longer than the time to live.
    new.clock().set(START.after(Span::from_secs(600)));
    new.expire_reservations().now_or_never().unwrap();
    assert_eq!(left(), 4);
}

/// A client repeats a settlement whose response was lost in the upgrade.
#[test]
fn settled_reservations_of_counters_move() {
    let (old, new) = (limiter(START), limiter(START));
    let rules = old.rules();
    let limits = rules.rule("api").unwrap().limits();
    let charge = CounterCharge {
        key: b"counter".as_slice().into(),
        limits: Arc::clone(limits),
        cost: Cost::new(2).unwrap(),
    };
    let reserved = old.reserve_counters(std::slice::from_ref(&charge), HOUR, None);
    let reserved = reserved.now_or_never().unwrap().unwrap();
    let token = reserved.reservation.unwrap().token;
    let settle = |limiter: &ServerLimiter| {
        let limits_of = |_: &[u8]| Some(Arc::clone(limits));
        let settled = limiter.settle_counters(&token, limits_of, 1).now_or_never();
        settled.unwrap().unwrap()
    };
    assert!(matches!(settle(&old), CounterSettlement::Settled(_)));
    hand_over(&old, &new).unwrap();
    assert_eq!(settle(&new), CounterSettlement::SettledBefore);
}

#[test]
fn a_small_difference_of_the_clocks_is_not_corrected() {
    let arrival = START.after(Span::from_millis(900));
    let (old, new) = (limiter(START), limiter(arrival));
    hand_over(&old, &new).unwrap();
    assert_eq!(new.now(), arrival);
}

#[test]
fn an_invalid_time_is_refused() {
    const TIME: u8 = 5;
    let error = limiter(START).take_state(TIME, b"1234567").unwrap_err();
    assert_eq!(
        error.to_string(),
        "the time of the old process cannot be read"
    );
}

/// The override file at the new path is of an earlier time, when the network was blocked.
#[tokio::test]
async fn an_override_file_that_the_old_process_did_not_use_is_renamed() {
    let path = |name: &str| {
        let name = format!("tidegate-handover-{}-{name}", std::process::id());
        std::env::temp_dir().join(name)
    };
    let [earlier, later] = ["a.overrides", "b.overrides"].map(path);
    let renamed = path("a.overrides.old");
    let [network, address] = [("ip", "203.0.113.0/24"), ("ip", "198.51.100.1")]
        .map(|entry| EntryBlockTarget::new(None, &[entry]).unwrap());
    let block = EntryBlock {
        until: None,
        reason: "attack".into(),
    };
    let mut first = limiter(START);
    first.persist_overrides_in(&earlier).unwrap();
    let set = first.set_entry_block(&network, block.clone()).await;
    assert_eq!(set.unwrap(), None);

    let mut old = limiter(START);
    old.persist_overrides_in(&later).unwrap();
    let set = old.set_entry_block(&address, block.clone()).await;
    assert_eq!(set.unwrap(), None);
    let mut new = limiter(START);
    new.persist_overrides_later_in(earlier.clone());
    hand_over(&old, &new).unwrap();
    let blocks = new.entry_blocks();
    assert_eq!(
        [blocks.get(&network), blocks.get(&address)],
        [None, Some(block.clone())]
    );
    assert!(renamed.exists());

    // If the path is the same, the file stays.
    let mut newest = limiter(START);
    newest.persist_overrides_later_in(earlier.clone());
    hand_over(&new, &newest).unwrap();
    assert_eq!(newest.entry_blocks().get(&address), Some(block));
    let lines = std::fs::read_to_string(&earlier).unwrap();
    assert_eq!(lines.lines().count(), 1);
    for file in [earlier, later, renamed] {
        std::fs::remove_file(file).unwrap();
    }
}
