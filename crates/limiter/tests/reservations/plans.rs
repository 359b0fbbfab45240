//! Reservations of requests that name a plan, and of rules that a reload changes or removes.

use tidegate_config::ReservationExpiry;
use tidegate_core::{Effect, Replacement, Span};
use tidegate_limiter::reservations::{NotOutstanding, ReservationError};
use tokio::runtime::Runtime;

use crate::{
    changed_limits::on_each_backend,
    fleet::{Backend, Fleet},
    kind::Kind,
};

const SECOND: u64 = 1_000_000;
const START: u64 = 1_700_006_400 * SECOND;
const TTL: u64 = 60 * SECOND;
const RESERVED: u64 = 10;
const WITHOUT_PLAN: [(&str, &str); 1] = [("user", "u")];
const WITH_PLAN: [(&str, &str); 2] = [("user", "u"), ("plan", "pro")];

/// The limits of the plan.
#[derive(Clone, Copy)]
enum Pro {
    Log(u64),
    Bucket(u64),
    Slots(u64),
}

/// Returns a rules file with a rule whose limits are lower than those of its plan.
fn rules(pro: Pro) -> String {
    let (base, pro) = match pro {
        Pro::Log(limit) => ("10/min".to_owned(), format!("{limit}/min")),
        Pro::Bucket(limit) => {
            let bucket = |limit| {
                format!("{{algorithm: token_bucket, capacity: {limit}, refill: {limit}/min}}")
            };
            (bucket(10), bucket(limit))
        }
        Pro::Slots(limit) => {
            let slots = |limit| format!("{{algorithm: concurrency, limit: {limit}, lease: 30s}}");
            (slots(1), slots(limit))
        }
    };
    format!(
        "plans:\n  pro: {{r0: {pro}}}\nrules:\n  \
         - {{name: r0, key: user, plan: plan, limits: [{base}]}}\n"
    )
}

fn fleet<'r>(runtime: &'r Runtime, backend: &'r Backend, pro: Pro, name: &str) -> Fleet<'r> {
    let on_expiry = ReservationExpiry::Refund;
    let prefix = format!("plans {name}");
    let fleet = Fleet::start(runtime, backend, &[Kind::Log], on_expiry, prefix, START);
    fleet.reload(&rules(pro));
    fleet
}

/// The excess is charged under the limits that the plan has after a reload.
#[test]
fn the_plan_of_a_reservation_decides_the_excess_after_a_reload() {
    on_each_backend(|runtime, backend| {
        for (name, pro, reloaded) in [
            ("log", Pro::Log(20), Pro::Log(40)),
            ("bucket", Pro::Bucket(20), Pro::Bucket(40)),
        ] {
            let fleet = fleet(runtime, backend, pro, name);
            let reservation = fleet.reserve_entries(0, &WITH_PLAN, RESERVED, TTL).unwrap();
            fleet.reload(&rules(reloaded));
            let settled = fleet
                .settle(fleet.len() - 1, &reservation.token, 30)
                .unwrap();
            assert_eq!((settled.settled, settled.over), (30, 20), "{name}");
            // The state was not converted to the limits of the rule, which would be exceeded.
            assert!(
                fleet.check_entries(0, &WITH_PLAN, 10, Effect::Peek),
                "{name}"
            );
            assert!(
                !fleet.check_entries(0, &WITH_PLAN, 11, Effect::Peek),
                "{name}"
            );
        }
    });
}

/// An override takes precedence over the plan only as long as it is set.
#[test]
fn the_plan_of_the_request_applies_after_an_override_has_ended() {
    on_each_backend(|runtime, backend| {
        let plan = || Replacement::Plan("pro".into());
        let doubled = || Replacement::Factor("2x".parse().unwrap());
        // The override, the entries of the request, and the units that are charged in the end.
        let cases = [
            ("doubled", doubled(), &WITH_PLAN[..], 25),
            ("plan", plan(), &WITHOUT_PLAN[..], 10),
        ];
        for (name, replacement, entries, charged) in cases {
            let fleet = fleet(runtime, backend, Pro::Log(25), name);
            fleet.set_override("r0", replacement);
            let reservation = fleet.reserve_entries(0, entries, RESERVED, TTL).unwrap();
            fleet.remove_override("r0");
            let settled = fleet.settle(fleet.len() - 1, &reservation.token, 30);
            assert_eq!(settled.unwrap().settled, charged, "{name}");
        }
    });
}

/// A factor multiplies the limits of the plan: for the reservation, for the excess at its
/// settlement, and for the renewal of a lost slot, on each server and after a restart.
#[test]
fn a_factor_multiplies_the_limits_of_the_plan_of_a_reservation() {
    on_each_backend(|runtime, backend| {
        let double = || Replacement::Factor("2x".parse().unwrap());
        for (name, pro) in [("log", Pro::Log(15)), ("bucket", Pro::Bucket(15))] {
            for is_killed in [false, true] {
                let name = format!("factor {name} {is_killed}");
                let mut fleet = fleet(runtime, backend, pro, &name);
                fleet.set_override("r0", double());
                let too_much = fleet.reserve_entries(0, &WITH_PLAN, 31, TTL);
                assert!(too_much.is_none(), "{name}");
                let token = fleet.reserve_entries(0, &WITH_PLAN, 25, TTL).unwrap().token;
                if is_killed {
                    fleet.save_snapshot();
                    fleet.kill(0);
                    fleet.reload(&rules(pro));
                    fleet.set_override("r0", double());
                }
                let settled = fleet.settle(fleet.len() - 1, &token, 40).unwrap();
                // Without the override, the plan admits 15 units, and the rule 10.
                assert_eq!((settled.settled, settled.over), (30, 15), "{name}");
                assert!(
                    !fleet.check_entries(0, &WITH_PLAN, 1, Effect::Peek),
                    "{name}"
                );
            }
        }
        let mut fleet = fleet(runtime, backend, Pro::Slots(1), "factor slots");
        fleet.set_override("r0", double());
        let tokens = reserve_and_lose_two_slots(&mut fleet, Pro::Slots(1));
        for token in &tokens {
            fleet.renew(fleet.len() - 1, token, TTL).unwrap();
        }
        assert!(fleet.reserve_entries(0, &WITH_PLAN, 1, TTL).is_none());
    });
}

/// Makes two reservations with the plan, changes the plan to `reloaded`, and loses both slots.
/// Returns the tokens.
fn reserve_and_lose_two_slots(fleet: &mut Fleet<'_>, reloaded: Pro) -> [String; 2] {
    // Two reservations of the same instant would have the same slot.
    let tokens = [0, 1].map(|at| {
        fleet.set_clocks(START + at * 1_000);
        fleet.reserve_entries(0, &WITH_PLAN, 1, TTL).unwrap().token
    });
    fleet.reload(&rules(reloaded));
    fleet.reset(0, 0);
    fleet.set_clocks(START + 2_000);
    tokens
}

/// A renewal acquires lost slots under the limits of the plan.
#[test]
fn a_renewal_uses_the_limits_of_the_plan_after_a_reload() {
    on_each_backend(|runtime, backend| {
        let pro = Pro::Slots(2);
        let mut fleet = fleet(runtime, backend, pro, "renewal");
        let tokens = reserve_and_lose_two_slots(&mut fleet, Pro::Slots(3));
        for token in &tokens {
            fleet.renew(fleet.len() - 1, token, TTL).unwrap();
        }
    });
}

/// A lost slot is acquired under the limits that apply at the renewal.
#[test]
fn a_renewal_acquires_a_lost_slot_under_the_current_limits() {
    on_each_backend(|runtime, backend| {
        let mut fleet = fleet(runtime, backend, Pro::Slots(2), "lost slot");
        let tokens = reserve_and_lose_two_slots(&mut fleet, Pro::Slots(1));
        let last = fleet.len() - 1;
        fleet.renew(last, &tokens[0], TTL).unwrap();
        let lost = fleet.renew(last, &tokens[1], TTL);
        let expected = ReservationError::NotOutstanding(NotOutstanding::SlotLost);
        assert_eq!(lost, Err(expected));
    });
}

/// A reload changes the leases. A renewal keeps a held slot, and reports no more time than the
/// shorter of both leases.
#[test]
fn a_renewal_keeps_a_held_slot_if_the_lease_has_changed() {
    on_each_backend(|runtime, backend| {
        for (lease, held_for) in [("60s", 30), ("10s", 10)] {
            let fleet = fleet(runtime, backend, Pro::Slots(2), lease);
            let token = fleet.reserve_entries(0, &WITH_PLAN, 1, TTL).unwrap().token;
            fleet.reload(&rules(Pro::Slots(2)).replace("30s", lease));
            let renewed = fleet.renew(fleet.len() - 1, &token, TTL).unwrap();
            assert_eq!(renewed.expires_in, Span::from_secs(held_for), "{lease}");
            assert_eq!(fleet.remaining(0, 0), 0, "{lease}");
        }
    });
}

const CONCURRENCY: &str = "{algorithm: concurrency, limit: 3, lease: 30s}";
const WINDOW: &str = "{algorithm: fixed_window, limit: 20, window: 1min}";

/// Returns a rules file with one rule. In `limits`, `SLOTS` and `WINDOW` stand for limits.
fn rules_with(limits: &str) -> String {
    format!("rules: [{{name: r0, key: user, cost: 1, limits: [{limits}]}}]")
        .replace("SLOTS", CONCURRENCY)
        .replace("WINDOW", WINDOW)
}

/// A reload adds a limit to a rule, removes one, or changes an algorithm. A renewal still renews
/// what was reserved, whether the slot is held or was lost, and the settlement gives everything
/// back.
#[test]
fn a_renewal_after_a_change_of_the_rule_renews_what_was_reserved() {
    on_each_backend(|runtime, backend| {
        let cases = [
            ("SLOTS", "SLOTS, 100/s"),
            ("SLOTS, 100/s", "SLOTS"),
            ("SLOTS, 20/min", "SLOTS, WINDOW"),
            ("20/min", "20/min, SLOTS"),
            ("20/min", "SLOTS"),
            // The window is as long as the lease.
            ("20/30s", "SLOTS"),
        ];
        for (before, after) in cases {
            for is_reset in [false, true] {
                let name = format!("{before} to {after}, {is_reset}");
                let mut fleet = fleet(runtime, backend, Pro::Log(20), &name);
                fleet.reload(&rules_with(before));
                let all = fleet.remaining(0, 0);
                let former = fleet
                    .reserve_entries(0, &WITHOUT_PLAN, 1, TTL)
                    .unwrap()
                    .token;
                let last = fleet.len() - 1;
                fleet.set_clocks(START + SECOND);
                fleet.renew(last, &former, TTL).unwrap();
                fleet.reload(&rules_with(after));
                if is_reset {
                    fleet.reset(0, 0);
                }
                fleet.set_clocks(START + 2 * SECOND);
                fleet.renew(last, &former, TTL).unwrap();
                assert_eq!(fleet.settle(last, &former, 0).unwrap().settled, 0, "{name}");
                fleet.reload(&rules_with(before));
                assert_eq!(fleet.remaining(0, 0), all, "{name}");
            }
        }
    });
}

/// A reload changes the number of limits, or an algorithm, and a request uses the new limits. Then
/// the slot cannot be found any more: a renewal reports that it is lost, and it stays held until
/// its lease ends, even if another reload undoes the change.
#[test]
fn a_slot_is_lost_after_a_request_under_a_changed_rule() {
    on_each_backend(|runtime, backend| {
        for (before, after) in [
            ("SLOTS", "SLOTS, 100/s"),
            ("SLOTS, 100/s", "SLOTS"),
            ("SLOTS, 20/min", "SLOTS, WINDOW"),
        ] {
            for is_undone in [false, true] {
                let name = format!("lost {before} to {after}, {is_undone}");
                let mut fleet = fleet(runtime, backend, Pro::Log(20), &name);
                fleet.reload(&rules_with(before));
                let reserve = fleet.reserve_entries(0, &WITHOUT_PLAN, 1, TTL);
                let token = reserve.unwrap().token;
                fleet.reload(&rules_with(after));
                fleet.set_clocks(START + SECOND);
                assert!(fleet.check_entries(0, &WITHOUT_PLAN, 1, Effect::Charge));
                if is_undone {
                    fleet.reload(&rules_with(before));
                }
                let last = fleet.len() - 1;
                let lost = ReservationError::NotOutstanding(NotOutstanding::SlotLost);
                assert_eq!(fleet.renew(last, &token, TTL), Err(lost), "{name}");
                assert_eq!(fleet.settle(last, &token, 0).unwrap().settled, 0, "{name}");
                assert_eq!(fleet.remaining(0, 0), 1, "{name}");
                fleet.set_clocks(START + 30 * SECOND);
                assert_eq!(fleet.remaining(0, 0), 2, "the lease has ended: {name}");
            }
        }
    });
}

/// A rule with rates and slots does not charge units beyond the reserved cost. After a reload, the
/// rule in force decides this. The replies and the charges are the same with each store.
#[test]
fn a_rule_with_slots_charges_no_excess() {
    on_each_backend(|runtime, backend| {
        for (before, after, settled, remaining) in [
            ("20/h, SLOTS", "20/h, SLOTS", 2, 18),
            ("20/h", "SLOTS", 2, 3),
            ("20/h", "20/h, SLOTS", 2, 18),
            ("20/h, SLOTS", "20/h", 9, 11),
            ("SLOTS", "20/h", 9, 13),
            ("SLOTS", "SLOTS", 9, 3),
            ("SLOTS", "20/h, SLOTS", 2, 20),
        ] {
            let name = format!("excess {before} to {after}");
            let fleet = fleet(runtime, backend, Pro::Log(20), &name);
            let of_request = |limits| rules_with(limits).replace("cost: 1, ", "");
            fleet.reload(&of_request(before));
            let reserve = fleet.reserve_entries(0, &WITHOUT_PLAN, 2, TTL);
            let token = reserve.unwrap().token;
            fleet.reload(&of_request(after));
            let reply = fleet.settle(fleet.len() - 1, &token, 9).unwrap();
            assert_eq!((reply.settled, reply.over), (settled, 7), "{name}");
            // No slot is held.
            assert!(
                fleet.check_entries(0, &WITHOUT_PLAN, 3, Effect::Peek),
                "{name}"
            );
            assert_eq!(fleet.remaining(0, 0), remaining, "{name}");
        }
    });
}

/// A rule in shadow mode admits every excess, so it does not reduce the settled units.
#[test]
fn a_shadow_rule_with_slots_does_not_reduce_the_settled_units() {
    on_each_backend(|runtime, backend| {
        let fleet = fleet(runtime, backend, Pro::Log(20), "shadow");
        let shadow = ", {name: s0, key: user, mode: shadow, limits: [20/h, SLOTS]}]";
        let rules = rules_with("100/h").replace("cost: 1, ", "");
        let rules = rules.trim_end_matches(']').to_owned() + shadow;
        fleet.reload(&rules.replace("SLOTS", CONCURRENCY));
        let reserve = fleet.reserve_entries(0, &WITHOUT_PLAN, 2, TTL);
        let token = reserve.unwrap().token;
        assert_eq!(fleet.settle(0, &token, 9).unwrap().settled, 9);
        assert_eq!(fleet.remaining(0, 0), 91);
    });
}

/// A concurrency limit becomes a log whose window is as long as the lease. After requests under the
/// log, a renewal loses the slot, and does not change the units of the log.
#[test]
fn a_renewal_keeps_the_units_of_slots_that_became_a_log() {
    on_each_backend(|runtime, backend| {
        for is_undone in [false, true] {
            let fleet = fleet(
                runtime,
                backend,
                Pro::Log(20),
                &format!("units {is_undone}"),
            );
            fleet.reload(&rules_with("SLOTS"));
            let reserve = fleet.reserve_entries(0, &WITHOUT_PLAN, 1, TTL);
            let token = reserve.unwrap().token;
            fleet.reload(&rules_with("20/30s"));
            for _ in 0..15 {
                assert!(fleet.check_entries(0, &WITHOUT_PLAN, 1, Effect::Charge));
            }
            if is_undone {
                fleet.reload(&rules_with("SLOTS"));
            }
            let lost = ReservationError::NotOutstanding(NotOutstanding::SlotLost);
            let renewed = fleet.renew(fleet.len() - 1, &token, TTL);
            assert_eq!(renewed.map(|_| ()), Err(lost), "{is_undone}");
            fleet.reload(&rules_with("20/30s"));
            assert_eq!(fleet.remaining(0, 0), 5, "{is_undone}");
        }
    });
}

/// A log becomes a concurrency limit whose lease is as long as the window. After a request, the
/// units of the reservation cannot be found, and the reply says so.
#[test]
fn units_of_a_log_that_became_slots_are_not_reported_as_released() {
    on_each_backend(|runtime, backend| {
        for (before, after) in [("20/30s", "SLOTS"), ("20/30s, WINDOW", "SLOTS, WINDOW")] {
            let fleet = fleet(runtime, backend, Pro::Log(20), &format!("{before} {after}"));
            fleet.reload(&rules_with(before));
            let reserve = fleet.reserve_entries(0, &WITHOUT_PLAN, 1, TTL);
            let token = reserve.unwrap().token;
            fleet.reload(&rules_with(after));
            assert!(fleet.check_entries(0, &WITHOUT_PLAN, 1, Effect::Charge));
            let settled = fleet.settle(fleet.len() - 1, &token, 0).unwrap();
            assert_eq!((settled.settled, settled.released), (0, 0), "{before}");
        }
    });
}

/// With Redis, a settlement can be repeated, which does not count as another end.
#[test]
fn a_repeated_settlement_is_counted_once() {
    on_each_backend(|runtime, backend| {
        let fleet = fleet(runtime, backend, Pro::Log(20), "repeated");
        let reserve = fleet.reserve_entries(0, &WITHOUT_PLAN, 2, TTL);
        let token = reserve.unwrap().token;
        fleet.settle(0, &token, 1).unwrap();
        assert_eq!(fleet.settle(0, &token, 1).is_ok(), backend.is_shared());
        let counted = "\ntidegate_reservations_ended_total{by=\"settle\"} 1\n";
        assert!(fleet.exposition(0).contains(counted));
    });
}

const LOGS: &str = "rules:
  - {name: r0, key: user, limits: [20/min]}
  - {name: slots, key: user, cost: 1, limits: [{algorithm: concurrency, limit: 3, lease: 30s}]}
";
const SLOTS: &str = "rules:
  - {name: slots, key: user, cost: 1, limits: [{algorithm: concurrency, limit: 3, lease: 30s}]}
";
const OTHER_RULES: &str = "rules: [{name: other, limits: [20/min]}]";

/// The charges of removed rules are refunded, and their slots are released, whichever way the
/// reservation ends. The rules come back later, so that their keys can be inspected.
#[test]
fn the_charges_of_removed_rules_are_refunded() {
    on_each_backend(|runtime, backend| {
        let ends = [Some(4), Some(30), None];
        let ends = ends
            .into_iter()
            .flat_map(|settled| [(settled, false), (settled, true)]);
        for (settled, is_killed) in ends {
            for (count, remaining) in [OTHER_RULES, SLOTS].into_iter().enumerate() {
                // No server has a rule of the reservation. Another service may have its rules.
                if settled.is_none() && is_killed && count == 0 && backend.is_shared() {
                    continue;
                }
                let name = format!("removed {count} {settled:?} {is_killed}");
                let mut fleet = fleet(runtime, backend, Pro::Log(20), &name);
                fleet.reload(LOGS);
                let token = fleet
                    .reserve_entries(0, &WITHOUT_PLAN, RESERVED, TTL)
                    .unwrap()
                    .token;
                assert_eq!(fleet.remaining_of(0, "slots", "u"), 2);
                fleet.reload(remaining);
                let last = fleet.len() - 1;
                if is_killed {
                    fleet.write_expiry_queues();
                    fleet.save_snapshot();
                    fleet.kill(0);
                    fleet.reload(remaining);
                }
                if let Some(cost) = settled {
                    let settled = fleet.settle(last, &token, cost).unwrap();
                    let released = RESERVED.saturating_sub(cost);
                    assert_eq!(
                        (settled.settled, settled.released),
                        (cost, released),
                        "{name}"
                    );
                } else {
                    let elapsed = 36 * SECOND;
                    fleet.set_clocks(START + elapsed);
                    fleet.run_tasks(elapsed);
                    assert!(fleet.is_idle(), "{name}");
                }
                fleet.reload(LOGS);
                // The excess of a removed rule is not charged.
                let charged = settled.unwrap_or(0).min(RESERVED);
                assert_eq!(fleet.remaining_of(0, "r0", "u"), 20 - charged, "{name}");
                assert_eq!(fleet.remaining_of(0, "slots", "u"), 3, "{name}");
            }
        }
    });
}
