//! The state of one key.

use crate::{
    algorithm::{Kernel, KernelState, Mark},
    eval::ChargeRecord,
    time::Timestamp,
};

/// The state of one key: a [`KernelState`] for each limit, except that sliding window logs share
/// one state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeyState {
    One(KernelState),
    Many(Box<[KernelState]>),
}

impl KeyState {
    pub(crate) fn from_states(mut states: Vec<KernelState>) -> Self {
        if states.len() == 1
            && let Some(state) = states.pop()
        {
            return Self::One(state);
        }
        Self::Many(states.into())
    }

    #[inline]
    pub(crate) fn states(&self) -> &[KernelState] {
        match self {
            Self::One(state) => std::slice::from_ref(state),
            Self::Many(states) => states,
        }
    }

    #[inline]
    pub(crate) fn states_mut(&mut self) -> &mut [KernelState] {
        match self {
            Self::One(state) => std::slice::from_mut(state),
            Self::Many(states) => states,
        }
    }

    /// Converts the state for other limits. Each kernel in `kernels` takes over the first remaining
    /// state of the same algorithm. If no state of the same algorithm remains, the kernel starts
    /// with the state of a new key. The function `adopt` converts a state for a kernel. `adopt`
    /// also receives the index of the state.
    pub(crate) fn converted<'k>(
        self,
        kernels: impl Iterator<Item = &'k Kernel>,
        mut adopt: impl FnMut(&Kernel, usize, KernelState) -> KernelState,
    ) -> Self {
        let states = self.into_states().into_iter().enumerate();
        let mut left: Vec<Option<(usize, KernelState)>> = states.map(Some).collect();
        let mut take = |kernel: &Kernel| {
            let same = left.iter_mut().find(|left| {
                left.as_ref()
                    .is_some_and(|(_, state)| kernel.is_kind_of(state))
            });
            let (index, state) = same.and_then(Option::take)?;
            Some(adopt(kernel, index, state))
        };
        let states = kernels.map(|kernel| take(kernel).unwrap_or_else(|| kernel.fresh()));
        Self::from_states(states.collect())
    }

    fn into_states(self) -> Vec<KernelState> {
        match self {
            Self::One(state) => vec![state],
            Self::Many(states) => states.into_vec(),
        }
    }

    /// Returns when the state expires. After the expiry, the state can be dropped without changing
    /// any decision.
    pub(crate) fn expires(&self) -> Timestamp {
        self.states()
            .iter()
            .map(KernelState::expires)
            .max()
            .unwrap_or_default()
    }

    /// Returns the instant at which the last spent unit expires, ignoring concurrency slots.
    pub(crate) fn units_expire(&self) -> Timestamp {
        let states = self.states().iter();
        let units = states.filter(|state| !matches!(state, KernelState::Lease(_)));
        units.map(KernelState::expires).max().unwrap_or_default()
    }

    /// Returns true if all concurrency slots of `charged` are still held and can be renewed without
    /// additional memory.
    pub(crate) fn renews_in_place(&self, charged: &ChargeRecord) -> bool {
        let mut states = self.states().iter().zip(&charged.marks);
        states.all(|(state, mark)| match (state, mark) {
            (KernelState::Lease(log), Some(Mark::HeldSince(since))) => {
                log.renews_in_place(*since, charged.cost)
            }
            _ => true,
        })
    }

    /// Returns the number of heap bytes that the state takes if it is boxed, including the
    /// `KeyState` value itself.
    pub(crate) fn boxed_bytes(&self) -> usize {
        let states = self.states();
        let outside = if let Self::Many(_) = self {
            size_of_val(states)
        } else {
            0
        };
        size_of::<Self>() + outside + states.iter().map(KernelState::heap_bytes).sum::<usize>()
    }
}
