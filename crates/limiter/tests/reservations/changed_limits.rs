//! Limits that an override changes: outstanding reservations, and inspections under other limits.

use tidegate_config::ReservationExpiry;
use tidegate_core::{Effect, Replacement};
use tidegate_limiter::reservations::{NotOutstanding, ReservationError};
use tokio::runtime::Runtime;

use crate::{
    fleet::{Backend, Fleet},
    kind::Kind,
    support::RedisServer,
};

const SECOND: u64 = 1_000_000;
const START: u64 = 1_700_006_400 * SECOND;
const TTL: u64 = 10 * SECOND;
const RESERVED: u64 = 10;
/// The user whose reservation ends, and a user who makes the same charges without a reservation.
const HOLDER: usize = 0;
const OTHER: usize = 1;

/// How a reservation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The last server settles the reservation at this cost.
    Settled(u64),
    /// The server that made the reservation ends it.
    Expired,
    /// The server that made the reservation is killed, and another server ends it.
    Orphaned,
}

/// Runs `test` for a memory store, for two servers that share a Redis, and for a cluster.
pub(crate) fn on_each_backend(test: impl Fn(&Runtime, &Backend)) {
    let runtime = crate::fleet::runtime();
    test(&runtime, &Backend::Memory);
    let redis = RedisServer::start();
    test(&runtime, &Backend::connect(&runtime, &redis.url(), false));
    let cluster = RedisServer::slotted("redis-server");
    test(&runtime, &Backend::connect(&runtime, &cluster.url(), true));
}

/// A fleet with one rule.
fn fleet<'r>(runtime: &'r Runtime, backend: &'r Backend, kind: Kind, name: &str) -> Fleet<'r> {
    let prefix = format!("{name} {kind:?}");
    let on_expiry = ReservationExpiry::Refund;
    Fleet::start(runtime, backend, &[kind], on_expiry, prefix, START)
}

/// Reserves units on the first server, and then doubles the limit.
fn reserve_and_double(fleet: &Fleet<'_>) -> String {
    let reservation = fleet.reserve(0, HOLDER, RESERVED, TTL).unwrap();
    fleet.set_override("r0", Replacement::Factor("2x".parse().unwrap()));
    reservation.token
}

/// Ends the reservation. Returns the units that the reply names as given back.
fn end(fleet: &mut Fleet<'_>, token: &str, end: End) -> Option<u64> {
    let last = fleet.len() - 1;
    match end {
        End::Settled(cost) => {
            let settled = fleet.settle(last, token, cost).unwrap();
            assert_eq!((settled.settled, settled.over), (cost, 0));
            Some(settled.released)
        }
        End::Expired => {
            fleet.set_clocks(START + TTL);
            fleet.run_tasks(TTL);
            None
        }
        End::Orphaned => {
            fleet.write_expiry_queues();
            fleet.kill(0);
            fleet.set_override("r0", Replacement::Factor("2x".parse().unwrap()));
            fleet.set_clocks(START + TTL + 6 * SECOND);
            fleet.run_tasks(TTL + 6 * SECOND);
            None
        }
    }
}

/// The end of a reservation refunds the charge as long as the key's state is still the state in
/// which it was charged, however the limits have changed since then.
#[test]
fn a_change_of_limits_alone_does_not_stop_a_refund() {
    on_each_backend(|runtime, backend| {
        for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Slots) {
            let mut ends = vec![End::Settled(4), End::Settled(0), End::Expired];
            if backend.is_shared() {
                ends.push(End::Orphaned);
            }
            for ending in ends {
                let mut fleet = fleet(runtime, backend, kind, &format!("alone {ending:?}"));
                let token = reserve_and_double(&fleet);
                let released = end(&mut fleet, &token, ending);
                let last = fleet.len() - 1;
                let cost = match ending {
                    End::Settled(cost) => cost,
                    End::Expired | End::Orphaned => 0,
                };
                if cost > 0 {
                    assert!(fleet.check(last, OTHER, cost, Effect::Charge));
                }
                let [left, expected] = [HOLDER, OTHER].map(|user| fleet.remaining(last, user));
                assert_eq!(left, expected, "{kind:?} {ending:?}");
                let unused = released.map(|_| RESERVED - cost);
                assert_eq!(released, unused, "{kind:?} {ending:?}");
            }
        }
    });
}

/// A request under the new limits converts the state of a bucket. Then the units stay charged,
/// whichever way the reservation ends, and the reply says so, even if the call is repeated.
#[test]
fn units_that_stay_charged_are_not_reported_as_released() {
    on_each_backend(|runtime, backend| {
        for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Slots) {
            let mut left = Vec::new();
            for ending in [End::Settled(0), End::Expired] {
                let mut fleet = fleet(runtime, backend, kind, &format!("kept {ending:?}"));
                let token = reserve_and_double(&fleet);
                assert!(fleet.check(0, HOLDER, 1, Effect::Charge));
                let before = fleet.remaining(0, HOLDER);
                let released = end(&mut fleet, &token, ending);
                // Both endings are compared at the same instant.
                fleet.set_clocks(START + TTL);
                left.push(fleet.remaining(0, HOLDER));
                if let Some(released) = released {
                    let stays = kind.is_bucket();
                    assert_eq!(released, if stays { 0 } else { RESERVED }, "{kind:?}");
                    assert!(left[0] >= before, "{kind:?}");
                    if backend.is_shared() {
                        let again = fleet.settle(0, &token, 0).unwrap();
                        assert_eq!((again.settled, again.released), (0, released), "{kind:?}");
                    }
                }
            }
            assert_eq!(left[0], left[1], "{kind:?}");
        }
    });
}

/// The units beyond the reserved units are a new charge.
#[test]
fn the_limits_in_force_decide_the_units_beyond_the_reserved_units() {
    on_each_backend(|runtime, backend| {
        for (factor, charged) in [("2x", 30), ("0.6x", 12)] {
            let fleet = fleet(runtime, backend, Kind::Log, &format!("excess {factor}"));
            let reservation = fleet.reserve(0, HOLDER, RESERVED, TTL).unwrap();
            fleet.set_override("r0", Replacement::Factor(factor.parse().unwrap()));
            let settled = fleet.settle(fleet.len() - 1, &reservation.token, 30);
            assert_eq!(settled.unwrap().settled, charged, "{factor}");
        }
    });
}

/// A renewal moves the slot. Every token of the reservation releases the slot that it holds then.
#[test]
fn any_token_of_a_renewed_reservation_releases_its_slot() {
    on_each_backend(|runtime, backend| {
        let repeated_settlement = |tokens: [&String; 2], fleet: &Fleet<'_>| {
            let [first, second] = tokens;
            assert_eq!(fleet.settle(0, first, 0).unwrap().settled, 0);
            assert_eq!(fleet.remaining(0, HOLDER), 3, "nothing stays held");
            // With Redis, a repeated settlement gets the same reply.
            let again = fleet.settle(fleet.len() - 1, second, 0);
            match backend {
                Backend::Redis(_) => assert_eq!(again.unwrap().settled, 0),
                Backend::Memory => {
                    let unknown = ReservationError::NotOutstanding(NotOutstanding::Unknown);
                    assert_eq!(again, Err(unknown));
                }
            }
            assert_eq!(fleet.remaining(0, HOLDER), 3, "no other slot is released");
        };
        for is_former_first in [false, true] {
            let name = format!("tokens {is_former_first}");
            let mut fleet = fleet(runtime, backend, Kind::Slots, &name);
            let former = fleet.reserve(0, HOLDER, 1, TTL).unwrap().token;
            fleet.set_clocks(START + 1);
            let renewed = fleet.renew(fleet.len() - 1, &former, TTL).unwrap().token;
            fleet.set_clocks(START + 2);
            // A renewal with the former token renews the same slot.
            let latest = fleet.renew(0, &former, TTL).unwrap().token;
            assert_eq!(fleet.remaining(0, HOLDER), 2, "one slot is held");
            fleet.set_clocks(START + 3);
            let tokens = match is_former_first {
                true => [&former, &latest],
                false => [&renewed, &former],
            };
            repeated_settlement(tokens, &fleet);
        }
    });
}

/// An override lowers the limits. An operator inspects one of two keys under the limits of the
/// rule, as `tidegate inspect` does for a key with a plan. Both keys get the same decisions.
#[test]
fn an_inspection_under_other_limits_changes_no_decision() {
    on_each_backend(|runtime, backend| {
        for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Slots) {
            let mut fleet = fleet(runtime, backend, kind, "inspect");
            fleet.set_override("r0", Replacement::Factor("0.25x".parse().unwrap()));
            let last = fleet.len() - 1;
            for step in 0..90 {
                for (at, effect) in [(1, Effect::Look), (2, Effect::Peek)] {
                    fleet.set_clocks(START + step * SECOND + at * 1_000);
                    fleet.inspect_under_rule(last, HOLDER, effect);
                }
                fleet.set_clocks(START + (step + 1) * SECOND);
                let decide = |user| fleet.check(0, user, 1, Effect::Charge);
                let [inspected, other] = [HOLDER, OTHER].map(decide);
                assert_eq!(inspected, other, "{kind:?} after {step} s");
            }
            let reservation = fleet.reserve(0, OTHER, 1, TTL);
            assert_eq!(
                reservation.is_some(),
                fleet.reserve(0, HOLDER, 1, TTL).is_some()
            );
        }
    });
}

/// An inspection under other limits between a reservation and its settlement does not stop the
/// refund of the unused units.
#[test]
fn an_inspection_under_other_limits_stops_no_refund() {
    on_each_backend(|runtime, backend| {
        for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Slots) {
            let fleet = fleet(runtime, backend, kind, "inspect refund");
            fleet.set_override("r0", Replacement::Factor("0.75x".parse().unwrap()));
            let reservation = fleet.reserve(0, HOLDER, RESERVED, TTL).unwrap();
            let last = fleet.len() - 1;
            fleet.inspect_under_rule(last, HOLDER, Effect::Peek);
            let settled = fleet.settle(last, &reservation.token, 0).unwrap();
            assert_eq!(settled.released, RESERVED, "{kind:?}");
        }
    });
}
