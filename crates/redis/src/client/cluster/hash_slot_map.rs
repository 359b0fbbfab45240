//! Merges several nodes' views of the cluster into one map of the hash slots.
//!
//! A node partitioned from its cluster keeps its last map, and cannot know that a replica has taken
//! over its slots. Therefore, if several nodes claim a slot, the node with the highest
//! configuration epoch is its owner. The cluster nodes resolve conflicts in the same way. A view
//! from a node that reports `cluster_state:fail` is used only if every node that replied reports
//! `cluster_state:fail`.

use super::{
    super::{hash_slot::HASH_SLOTS, settings::Address},
    view::{Claim, ClusterView, ReportedState},
};

/// The map of the hash slots, merged from the views of several nodes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct HashSlotMap {
    /// Ranges of adjacent slots with one owner, in ascending order. Slots that no node claims are
    /// missing.
    pub(super) ranges: Vec<HashSlotRange>,
    /// Every address in any of the views, including replicas.
    pub(super) addresses: Vec<Address>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HashSlotRange {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) owner: Address,
    pub(super) availability: Availability,
}

/// Whether the owner of a slot serves its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Availability {
    Available,
    /// The owner reports `cluster_state:fail`, or every node that replied reports it.
    Unavailable,
}

/// Merges `views`, each from a different node.
pub(super) fn merge(views: &[ClusterView]) -> HashSlotMap {
    let is_any_ok = views.iter().any(|view| view.state == ReportedState::Ok);
    let trusted = || {
        let usable = move |view: &&ClusterView| !is_any_ok || view.state == ReportedState::Ok;
        views.iter().filter(usable)
    };
    let state_of = |id: &str| {
        let own = views.iter().find(|view| view.reporter == id);
        own.map(|view| view.state)
    };
    let answered = |id: &str| trusted().any(|view| view.reporter == id);

    let mut own_claims: Vec<Option<&Claim>> = vec![None; usize::from(HASH_SLOTS)];
    for view in trusted() {
        for claim in &view.claims {
            // A node has the latest information about its own slots; the other nodes' information
            // about these slots may be older.
            if claim.owner == view.reporter || !answered(&claim.owner) {
                assign(&mut own_claims, claim, |current| {
                    current.epoch < claim.epoch
                });
            }
        }
    }
    // Sometimes no node claims a slot for itself, for example briefly during a migration. The slot
    // then belongs to the node that the other nodes report as its owner. If their reports differ,
    // the report with the highest epoch wins.
    let mut any_claims: Vec<Option<&Claim>> = vec![None; usize::from(HASH_SLOTS)];
    for claim in trusted().flat_map(|view| &view.claims) {
        assign(&mut any_claims, claim, |current| {
            current.epoch < claim.epoch
        });
    }
    let chosen = own_claims
        .iter()
        .zip(&any_claims)
        .map(|(own, any)| own.or(*any));
    let availability = |claim: &Claim| {
        if is_any_ok && state_of(&claim.owner) != Some(ReportedState::Failed) {
            Availability::Available
        } else {
            Availability::Unavailable
        }
    };
    let mut addresses = Vec::new();
    for address in views
        .iter()
        .flat_map(|view| &view.claims)
        .flat_map(|claim| &claim.servers)
    {
        if !addresses.contains(address) {
            addresses.push(address.clone());
        }
    }
    HashSlotMap {
        ranges: join_ranges(chosen, availability),
        addresses,
    }
}

/// Assigns each slot in the range of `claim` to this claim if the slot is unassigned. If the slot
/// is assigned to another claim, reassigns it only if `replaces` returns true for that claim.
fn assign<'c>(
    slots: &mut [Option<&'c Claim>],
    claim: &'c Claim,
    replaces: impl Fn(&Claim) -> bool,
) {
    // `view::parse_claim` has checked `first <= last < HASH_SLOTS`.
    for slot in &mut slots[usize::from(claim.first)..=usize::from(claim.last)] {
        if slot.is_none_or(&replaces) {
            *slot = Some(claim);
        }
    }
}

/// Joins adjacent slots with the same owner.
fn join_ranges<'c>(
    chosen: impl Iterator<Item = Option<&'c Claim>>,
    availability: impl Fn(&Claim) -> Availability,
) -> Vec<HashSlotRange> {
    let mut ranges: Vec<HashSlotRange> = Vec::new();
    for (slot, claim) in (0..HASH_SLOTS).zip(chosen) {
        let Some((claim, owner)) = claim.and_then(|claim| Some((claim, claim.servers.first()?)))
        else {
            continue;
        };
        match ranges.last_mut() {
            Some(range) if range.last + 1 == slot && range.owner == *owner => range.last = slot,
            _ => ranges.push(HashSlotRange {
                first: slot,
                last: slot,
                owner: owner.clone(),
                availability: availability(claim),
            }),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: &str) -> Address {
        Address::parse(&format!("redis://{host}:7000")).unwrap().0
    }

    fn claim(owner: &str, epoch: u64, first: u16, last: u16) -> Claim {
        Claim {
            first,
            last,
            owner: owner.to_owned(),
            epoch,
            servers: vec![address(owner)],
        }
    }

    fn view(reporter: &str, state: ReportedState, claims: &[Claim]) -> ClusterView {
        ClusterView {
            reporter: reporter.to_owned(),
            state,
            claims: claims.to_vec(),
        }
    }

    fn owners(views: &[ClusterView]) -> Vec<(u16, u16, String, Availability)> {
        let ranges = merge(views).ranges.into_iter();
        ranges
            .map(|range| {
                (
                    range.first,
                    range.last,
                    range.owner.host,
                    range.availability,
                )
            })
            .collect()
    }

    fn range(
        first: u16,
        last: u16,
        owner: &str,
        availability: Availability,
    ) -> (u16, u16, String, Availability) {
        (first, last, owner.to_owned(), availability)
    }

    /// `a` was partitioned before its replica `r` took over. `a` still replies to queries, but with
    /// its old map.
    #[test]
    fn the_highest_epoch_wins_whichever_node_answers_first() {
        let old = [claim("a", 1, 0, 99), claim("b", 2, 100, 199)];
        let new = [claim("r", 7, 0, 99), claim("b", 2, 100, 199)];
        let expected = [
            range(0, 99, "r", Availability::Available),
            range(100, 199, "b", Availability::Available),
        ];
        for state in [ReportedState::Ok, ReportedState::Failed] {
            let (a, b) = (view("a", state, &old), view("b", ReportedState::Ok, &new));
            let r = view("r", ReportedState::Ok, &new);
            for views in [[a.clone(), b.clone(), r.clone()], [r, b, a]] {
                assert_eq!(owners(&views), expected, "{state:?}");
            }
        }
    }

    #[test]
    fn slots_of_an_owner_in_a_failed_cluster_are_not_served() {
        let map = [claim("a", 1, 0, 99), claim("b", 2, 100, 199)];
        // `a` is not replaced yet: the other nodes still report `a` as the owner.
        let (a, b) = (
            view("a", ReportedState::Failed, &map),
            view("b", ReportedState::Ok, &map),
        );
        assert_eq!(
            owners(&[a.clone(), b]),
            [
                range(0, 99, "a", Availability::Unavailable),
                range(100, 199, "b", Availability::Available)
            ]
        );
        // Only partitioned nodes reply.
        assert_eq!(
            owners(&[a]),
            [
                range(0, 99, "a", Availability::Unavailable),
                range(100, 199, "b", Availability::Unavailable)
            ]
        );
    }

    /// `c` knows the new epoch of `b`, but not yet that slots 5 to 9 have moved from `b` to `d`.
    #[test]
    fn the_claim_of_a_node_outweighs_the_reports_of_others() {
        let c = view("c", ReportedState::Ok, &[claim("b", 13, 0, 9)]);
        let b = view(
            "b",
            ReportedState::Ok,
            &[claim("b", 13, 0, 4), claim("d", 12, 5, 9)],
        );
        let expected = [
            range(0, 4, "b", Availability::Available),
            range(5, 9, "d", Availability::Available),
        ];
        assert_eq!(owners(&[c.clone(), b.clone()]), expected);
        let d = view(
            "d",
            ReportedState::Ok,
            &[claim("b", 12, 0, 4), claim("d", 12, 5, 9)],
        );
        assert_eq!(owners(&[c, b, d]), expected);
    }

    /// The old owner no longer claims a slot, and the new owner does not claim it yet.
    #[test]
    fn a_slot_unclaimed_by_its_owner_goes_to_the_node_others_name() {
        let source = view(
            "a",
            ReportedState::Ok,
            &[claim("a", 1, 0, 4), claim("b", 2, 5, 5)],
        );
        let target = view("b", ReportedState::Ok, &[claim("a", 1, 0, 4)]);
        assert_eq!(
            owners(&[source, target]),
            [
                range(0, 4, "a", Availability::Available),
                range(5, 5, "b", Availability::Available)
            ]
        );
    }

    #[test]
    fn unclaimed_slots_are_missing() {
        let a = view(
            "a",
            ReportedState::Ok,
            &[claim("a", 1, 0, 4), claim("a", 1, 10, 12)],
        );
        assert_eq!(
            owners(&[a]),
            [
                range(0, 4, "a", Availability::Available),
                range(10, 12, "a", Availability::Available)
            ]
        );
        assert_eq!(owners(&[]), []);
    }
}
