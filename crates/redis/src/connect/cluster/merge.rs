//! One map of the slots from the views of several nodes.
//!
//! A node that is cut off from its cluster keeps the map of the moment at which it was cut off, and cannot know that
//! a replica has taken its slots over. So each slot goes to the node that claims it by the highest configuration
//! epoch, by which the nodes themselves resolve conflicts, and views of nodes that say `cluster_state:fail` are used
//! only if there are no others.

use super::{
    super::{settings::Address, slots::SLOTS},
    view::{Claim, State, View},
};

/// Which node has which slot, as several views come to it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SlotMap {
    /// Runs of neighbouring slots with one owner, in ascending order; slots that no node claims are missing.
    pub(super) runs: Vec<Run>,
    /// Every address that a view names, replicas too.
    pub(super) addresses: Vec<Address>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) owner: Address,
    pub(super) decides: Decides,
}

/// Whether the owner of a slot decides about its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decides {
    Yes,
    /// It says `cluster_state:fail`, or every node that answered does.
    No,
}

/// Merges `views`; they are of different nodes.
pub(super) fn merge(views: &[View]) -> SlotMap {
    let is_any_ok = views.iter().any(|view| view.state == State::Ok);
    let trusted = || {
        let usable = move |view: &&View| !is_any_ok || view.state == State::Ok;
        views.iter().filter(usable)
    };
    let state_of = |id: &str| {
        let own = views.iter().find(|view| view.informant == id);
        own.map(|view| view.state)
    };
    let answered = |id: &str| trusted().any(|view| view.informant == id);

    let mut best: Vec<Option<&Claim>> = vec![None; usize::from(SLOTS)];
    for view in trusted() {
        for claim in &view.claims {
            // A node knows best which slots it has; what others say of it may be older.
            if claim.owner == view.informant || !answered(&claim.owner) {
                take(&mut best, claim, |held| held.epoch < claim.epoch);
            }
        }
    }
    // A slot that no owner claims itself, as for a moment while it moves: any claim is better than none.
    let mut second: Vec<Option<&Claim>> = vec![None; usize::from(SLOTS)];
    for claim in trusted().flat_map(|view| &view.claims) {
        take(&mut second, claim, |held| held.epoch < claim.epoch);
    }
    let chosen = best
        .iter()
        .zip(&second)
        .map(|(best, second)| best.or(*second));
    let decides = |claim: &Claim| {
        if is_any_ok && state_of(&claim.owner) != Some(State::Failed) {
            Decides::Yes
        } else {
            Decides::No
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
    SlotMap {
        runs: runs(chosen, decides),
        addresses,
    }
}

/// Gives the slots of `claim` to it where nothing holds them, or where `outdoes` says so of what does.
fn take<'c>(slots: &mut [Option<&'c Claim>], claim: &'c Claim, outdoes: impl Fn(&Claim) -> bool) {
    // The view was read with `first <= last < SLOTS`.
    for slot in &mut slots[usize::from(claim.first)..=usize::from(claim.last)] {
        if slot.is_none_or(&outdoes) {
            *slot = Some(claim);
        }
    }
}

/// Joins neighbouring slots of one owner.
fn runs<'c>(
    chosen: impl Iterator<Item = Option<&'c Claim>>,
    decides: impl Fn(&Claim) -> Decides,
) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (slot, claim) in (0..SLOTS).zip(chosen) {
        let Some((claim, owner)) = claim.and_then(|claim| Some((claim, claim.servers.first()?)))
        else {
            continue;
        };
        match runs.last_mut() {
            Some(run) if run.last + 1 == slot && run.owner == *owner => run.last = slot,
            _ => runs.push(Run {
                first: slot,
                last: slot,
                owner: owner.clone(),
                decides: decides(claim),
            }),
        }
    }
    runs
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

    fn view(informant: &str, state: State, claims: &[Claim]) -> View {
        View {
            informant: informant.to_owned(),
            state,
            claims: claims.to_vec(),
        }
    }

    fn owners(views: &[View]) -> Vec<(u16, u16, String, Decides)> {
        let runs = merge(views).runs.into_iter();
        runs.map(|run| (run.first, run.last, run.owner.host, run.decides))
            .collect()
    }

    fn run(first: u16, last: u16, owner: &str, decides: Decides) -> (u16, u16, String, Decides) {
        (first, last, owner.to_owned(), decides)
    }

    /// `a` was cut off before its replica `r` took over; it answers us, with its old map.
    #[test]
    fn the_highest_epoch_wins_whichever_node_answers_first() {
        let old = [claim("a", 1, 0, 99), claim("b", 2, 100, 199)];
        let new = [claim("r", 7, 0, 99), claim("b", 2, 100, 199)];
        let expected = [
            run(0, 99, "r", Decides::Yes),
            run(100, 199, "b", Decides::Yes),
        ];
        for state in [State::Ok, State::Failed] {
            let (a, b) = (view("a", state, &old), view("b", State::Ok, &new));
            let r = view("r", State::Ok, &new);
            for views in [[a.clone(), b.clone(), r.clone()], [r, b, a]] {
                assert_eq!(owners(&views), expected, "{state:?}");
            }
        }
    }

    #[test]
    fn slots_whose_owner_says_that_the_cluster_failed_are_not_decided() {
        let map = [claim("a", 1, 0, 99), claim("b", 2, 100, 199)];
        // Not replaced yet: the others still name it.
        let (a, b) = (view("a", State::Failed, &map), view("b", State::Ok, &map));
        assert_eq!(
            owners(&[a.clone(), b]),
            [
                run(0, 99, "a", Decides::No),
                run(100, 199, "b", Decides::Yes)
            ]
        );
        // Only the cut-off side answers.
        assert_eq!(
            owners(&[a]),
            [
                run(0, 99, "a", Decides::No),
                run(100, 199, "b", Decides::No)
            ]
        );
    }

    /// `c` heard that `b` has a new epoch, and not yet that slot 5 went from `b` to `d` before.
    #[test]
    fn what_a_node_says_of_itself_outweighs_what_others_say_of_it() {
        let c = view("c", State::Ok, &[claim("b", 13, 0, 9)]);
        let b = view(
            "b",
            State::Ok,
            &[claim("b", 13, 0, 4), claim("d", 12, 5, 9)],
        );
        let expected = [run(0, 4, "b", Decides::Yes), run(5, 9, "d", Decides::Yes)];
        assert_eq!(owners(&[c.clone(), b.clone()]), expected);
        let d = view(
            "d",
            State::Ok,
            &[claim("b", 12, 0, 4), claim("d", 12, 5, 9)],
        );
        assert_eq!(owners(&[c, b, d]), expected);
    }

    /// A slot whose target does not claim it yet, and whose source does not any more.
    #[test]
    fn a_slot_that_its_owner_does_not_claim_goes_to_the_one_that_others_name() {
        let source = view("a", State::Ok, &[claim("a", 1, 0, 4), claim("b", 2, 5, 5)]);
        let target = view("b", State::Ok, &[claim("a", 1, 0, 4)]);
        assert_eq!(
            owners(&[source, target]),
            [run(0, 4, "a", Decides::Yes), run(5, 5, "b", Decides::Yes)]
        );
    }

    #[test]
    fn slots_that_no_node_claims_are_missing() {
        let a = view(
            "a",
            State::Ok,
            &[claim("a", 1, 0, 4), claim("a", 1, 10, 12)],
        );
        assert_eq!(
            owners(&[a]),
            [run(0, 4, "a", Decides::Yes), run(10, 12, "a", Decides::Yes)]
        );
        assert_eq!(owners(&[]), []);
    }
}
