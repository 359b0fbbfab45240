//! Tests of a quota bucket with simulated Envoys that follow their assignments.

use proptest::{collection::vec, prelude::*};

use super::*;

const START: Timestamp = Timestamp::from_micros(1_700_000_040_000_000);

fn limit(requests: u32, seconds: u64) -> QuotaLimit {
    QuotaLimit {
        requests,
        period: Span::from_secs(seconds),
    }
}

fn at(seconds: u64) -> Timestamp {
    START.after(Span::from_secs(seconds))
}

fn used(allowed: u64, denied: u64) -> Usage {
    used_in(Span::ZERO, allowed, denied)
}

fn used_in(elapsed: Span, allowed: u64, denied: u64) -> Usage {
    Usage {
        allowed,
        denied,
        elapsed,
    }
}

const A: StreamId = StreamId(1);
const B: StreamId = StreamId(2);

fn of(changes: &AssignmentChanges, stream: StreamId) -> Option<Assignment> {
    let found = changes.iter().find(|(of, _)| *of == stream);
    found.map(|(_, assignment)| *assignment)
}

fn requests(assignment: Option<Assignment>) -> u32 {
    match assignment {
        Some(Assignment::Rate { requests, .. } | Assignment::Budget { requests, .. }) => requests,
        Some(Assignment::DenyAll) => 0,
        other => panic!("{other:?} is not a share"),
    }
}

#[test]
fn rate_shares_follow_demand_and_add_up() {
    let mut bucket = Bucket::new(limit(100, 1), at(0));
    assert_eq!(requests(of(&bucket.report(A, used(1, 0), at(0)), A)), 100);
    let both = bucket.report(B, used(1, 0), at(0));
    assert_eq!((requests(of(&both, A)), requests(of(&both, B))), (50, 50));

    let changes = bucket.report(A, used(1_500, 0), at(5));
    let (a, b) = (requests(of(&changes, A)), requests(of(&changes, B)));
    assert_eq!(a + b, 100);
    assert!(a > 90 && b >= 5, "{a} {b}");
}

/// After a reconnect, a stream reports all usage since its last report in a single report.
#[test]
fn the_first_report_is_divided_by_the_time_it_covers() {
    let mut bucket = Bucket::new(limit(100, 1), at(0));
    bucket.report(A, used(100, 0), at(0));
    let both = bucket.report(B, used_in(Span::from_millis(9_500), 900, 100), at(0));
    assert_eq!((requests(of(&both, A)), requests(of(&both, B))), (50, 50));
}

#[test]
fn a_small_change_of_a_rate_is_not_sent() {
    let mut bucket = Bucket::new(limit(100, 1), at(0));
    bucket.report(A, used(1, 0), at(0));
    bucket.report(B, used(1, 0), at(0));
    bucket.report(A, used(200, 0), at(5));
    bucket.report(B, used(200, 0), at(5));
    let before = bucket.report(A, used(200, 0), at(10));
    let after = bucket.report(A, used(210, 0), at(15));
    assert_eq!(
        after,
        [(A, of(&before, A).unwrap())],
        "sent only to the stream that reports"
    );
}

#[test]
fn the_share_of_a_stream_that_leaves_is_redistributed_at_once() {
    let mut bucket = Bucket::new(limit(100, 1), at(0));
    bucket.report(A, used(1, 0), at(0));
    bucket.report(B, used(1, 0), at(0));
    assert_eq!(requests(of(&bucket.remove_stream(A, at(1)), B)), 100);
    assert!(!bucket.is_vacant());
    bucket.remove_stream(B, at(1));
    assert!(bucket.is_vacant());
}

#[test]
fn a_rate_smaller_than_the_number_of_streams_denies_some() {
    let mut bucket = Bucket::new(limit(1, 1), at(0));
    bucket.report(A, used(1, 0), at(0));
    let changes = bucket.report(B, used(9, 0), at(0));
    assert_eq!(of(&changes, A), Some(Assignment::DenyAll));
    assert_eq!(requests(of(&changes, B)), 1);
}

#[test]
fn an_exhausted_budget_denies_until_the_window_ends() {
    let mut bucket = Bucket::new(limit(100, 60), at(0));
    let mut total = 1;
    let mut grant = requests(of(&bucket.report(A, used(1, 0), at(0)), A));
    for second in 1..30 {
        total += u64::from(grant);
        let changes = bucket.report(A, used(grant.into(), 5), at(second));
        grant = requests(of(&changes, A));
        if of(&changes, A) == Some(Assignment::DenyAll) {
            break;
        }
    }
    assert_eq!(total, 100);
    assert!(bucket.roll(at(59)).is_empty(), "the window lasts until :00");
    let changes = bucket.roll(at(60));
    assert_eq!(
        requests(of(&changes, A)),
        95,
        "all but the seat reserved for a new stream"
    );
}

#[test]
fn a_second_stream_gets_part_of_the_budget_at_once() {
    let mut bucket = Bucket::new(limit(1_000, 3_600), at(0));
    bucket.report(A, used(1, 0), at(0));
    assert!(requests(of(&bucket.report(B, used(1, 0), at(0)), B)) > 20);
}

#[test]
fn a_new_grant_of_the_same_size_differs_from_the_old_one() {
    let mut bucket = Bucket::new(limit(1_000, 3_600), at(0));
    let first = bucket.report(A, used(0, 0), at(0));
    bucket.set_limit(limit(1_900, 3_600), at(1));
    let again = bucket.report(A, used(950, 0), at(1));
    assert_ne!(of(&first, A), of(&again, A));
}

#[test]
fn a_silent_stream_loses_its_seat() {
    let mut bucket = Bucket::new(limit(100, 1), at(0));
    bucket.report(A, used(1, 0), at(0));
    bucket.report(B, used(1, 0), at(0));
    assert_eq!(requests(of(&bucket.report(B, used(1, 0), at(61)), B)), 100);
}

/// A simulated Envoy: the remaining requests of its assignment, and its usage since its last
/// report.
#[derive(Clone, Copy, Debug, Default)]
struct Envoy {
    assigned: Option<Assignment>,
    holds: u64,
    passed: u64,
    denied: u64,
    /// The number of requests in the current window that this Envoy has allowed but not yet
    /// reported.
    unreported: u64,
    reported_at: u64,
}

#[derive(Clone, Debug)]
enum Event {
    Ask(usize, u64),
    Report(usize),
    Leave(usize),
    Wait(u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => (0..4_usize, 1..60_u64).prop_map(|(envoy, requests)| Event::Ask(envoy, requests)),
        4 => (0..4_usize).prop_map(Event::Report),
        1 => (0..4_usize).prop_map(Event::Leave),
        1 => (0..20_u64).prop_map(Event::Wait),
    ];
    vec(event, 0..200)
}

/// Four simulated Envoys, their shared quota bucket, and the current time.
struct World {
    bucket: Bucket,
    envoys: [Envoy; 4],
    seconds: u64,
    /// The number of requests allowed in the current window, excluding the unreported usage of
    /// departed Envoys.
    passed: u64,
}

impl World {
    fn step(&mut self, event: &Event) {
        match *event {
            Event::Ask(at, requests) => {
                let envoy = &mut self.envoys[at];
                let pass = requests.min(envoy.holds);
                envoy.holds -= pass;
                envoy.passed += pass;
                envoy.unreported += pass;
                envoy.denied += requests - pass;
                self.passed += pass;
            }
            Event::Report(id) => self.report(id),
            Event::Leave(id) => {
                self.passed -= self.envoys[id].unreported;
                self.envoys[id] = Envoy::default();
                let changes = self
                    .bucket
                    .remove_stream(StreamId(id as u64), at(self.seconds));
                self.assign(changes);
            }
            Event::Wait(wait) => self.wait(wait),
        }
    }

    fn wait(&mut self, wait: u64) {
        let window = self.seconds / 60;
        self.seconds += wait;
        if self.seconds / 60 > window {
            self.passed = 0;
            self.envoys
                .iter_mut()
                .for_each(|envoy| envoy.unreported = 0);
        }
        let changes = self.bucket.roll(at(self.seconds));
        self.assign(changes);
        // The four Envoys report less often than every five seconds, but often enough that the
        // bucket does not remove their streams.
        for id in 0..4 {
            if self.envoys[id].assigned.is_some()
                && self.seconds - self.envoys[id].reported_at >= 40
            {
                self.report(id);
            }
        }
    }

    fn report(&mut self, id: usize) {
        let envoy = &mut self.envoys[id];
        let usage = used(envoy.passed, envoy.denied);
        (envoy.passed, envoy.denied, envoy.unreported) = (0, 0, 0);
        envoy.reported_at = self.seconds;
        let changes = self
            .bucket
            .report(StreamId(id as u64), usage, at(self.seconds));
        self.assign(changes);
    }

    fn assign(&mut self, changes: AssignmentChanges) {
        for (stream, assignment) in changes {
            let envoy = &mut self.envoys[usize::try_from(stream.0).unwrap()];
            // If the assignment is unchanged, Envoy only extends it, and does not refill the token
            // bucket.
            if envoy.assigned != Some(assignment) {
                envoy.assigned = Some(assignment);
                envoy.holds = requests(Some(assignment)).into();
            }
        }
    }
}

proptest! {
    /// For any sequence of requests, reports and departures, all Envoys together never allow more
    /// requests in a window than the limit. The unreported usage of departed Envoys is excluded,
    /// because the server does not know it.
    #[test]
    fn budgets_never_admit_more_than_the_limit(most in 0..300_u32, events in events()) {
        let bucket = Bucket::new(limit(most, 60), at(0));
        let mut world = World { bucket, envoys: [Envoy::default(); 4], seconds: 0, passed: 0 };
        for event in events {
            world.step(&event);
            prop_assert!(world.passed <= most.into(), "{} of {most}", world.passed);
        }
    }
}

/// A rate's share must not be treated as a budget grant, even if both have the same size.
#[test]
fn a_rate_that_becomes_a_budget_is_divided_again() {
    let mut bucket = Bucket::new(limit(100, 1), at(0));
    bucket.report(A, used(1, 0), at(0));
    bucket.set_limit(limit(100, 60), at(1));
    let assigned = of(&bucket.report(A, used(1, 0), at(2)), A);
    assert!(
        matches!(assigned, Some(Assignment::Budget { .. })),
        "{assigned:?}"
    );
}

/// Usage in an expired window must not count in a later window, regardless of the window lengths.
#[test]
fn a_limit_that_changes_after_its_window_starts_unused() {
    for reported_first in [false, true] {
        let mut bucket = Bucket::new(limit(100, 60), at(0));
        bucket.report(A, used(80, 0), at(10));
        let changes = if reported_first {
            bucket.set_limit(limit(100, 3_600), at(61));
            bucket.report(A, used(0, 0), at(61))
        } else {
            bucket.apply_limit(limit(100, 3_600), at(61))
        };
        assert_eq!(
            requests(of(&changes, A)),
            95,
            "all but the seat reserved for a new stream"
        );
        assert_eq!(changes.len(), 1);
    }
}

#[test]
fn usage_of_a_window_survives_a_temporary_rate() {
    let mut bucket = Bucket::new(limit(100, 3_600), at(0));
    bucket.report(A, used(90, 0), at(10));
    bucket.apply_limit(limit(100, 1), at(20));
    let changes = bucket.apply_limit(limit(100, 3_600), at(30));
    assert!((1..=10).contains(&requests(of(&changes, A))), "{changes:?}");
    bucket.apply_limit(limit(100, 1), at(40));
    let changes = bucket.apply_limit(limit(100, 3_600), at(3_700));
    assert_eq!(requests(of(&changes, A)), 95);
}

#[test]
fn a_denial_that_continues_is_not_sent_again() {
    let mut bucket = Bucket::new(limit(0, 60), at(0));
    for stream in [A, B] {
        let assigned = bucket.report(stream, used(1, 0), at(0));
        assert_eq!(assigned, [(stream, Assignment::DenyAll)]);
    }
    assert_eq!(bucket.remove_stream(B, at(60)), []);
}

/// If a limit has been raised, the first report under the new limit also updates the other streams'
/// assignments.
#[test]
fn a_report_under_a_new_limit_updates_the_other_streams() {
    let mut bucket = Bucket::new(limit(0, 3_600), at(0));
    for stream in [A, B] {
        bucket.report(stream, used(1, 0), at(0));
    }
    bucket.set_limit(limit(100, 3_600), at(1));
    let changes = bucket.report(A, used(0, 0), at(1));
    assert!(requests(of(&changes, A)) > 0, "{changes:?}");
    assert!(requests(of(&changes, B)) > 0, "{changes:?}");
}
