//! Finds states that were written by a clock that was ahead: the clock of a former primary, or the
//! clock of this primary before it was set back.
//!
//! Most states contain the approximate instant at which they were written: the newest entry of a
//! sliding window log, or the index of a window. The state of a GCRA limit or an interval bucket,
//! however, contains only the instant at which the bucket is full again. If a server with a larger
//! limit has charged the key, the instant can be far in the future even for a correct clock.
//! Therefore, the state of a GCRA limit or an interval bucket also contains a byte with its *lead*.
//! The lead is an upper bound on how far the stored instant was ahead of the clock when the state
//! was written. The fast path does not compute how far the instant is ahead of the clock. Instead,
//! the fast path always stores the lead of an exhausted limit.
//!
//! ```text
//!   written ──── lead ───▶ arrival     now + CLOCK_JUMP + lead < arrival: the clock was ahead
//!      │                      │
//!   ───┼──────────────────────┼──▶
//! ```
//!
//! If a script detects a state that was written by a clock that was ahead (`lead.lua`), the script
//! returns the states without a decision. The store clamps the states with the algorithms of the
//! memory store, and runs the script again. The store also clamps states that were stored under
//! other parameters.

use tidegate_core::{Timestamp, remote_eval::CLOCK_JUMP};

/// The unit of a lead is 2^19 microseconds, about half a second.
const UNIT_BITS: u32 = 19;

/// The number of stored bits of a mantissa. A mantissa is between 8 and 15. Its highest bit is
/// always set, and is not stored.
const MANTISSA_BITS: u32 = 3;
/// The smallest mantissa.
const LEAST_MANTISSA: u64 = 1 << MANTISSA_BITS;

/// Returns the lead for `ahead` microseconds: the upper five bits are an exponent, and the lower
/// three bits are a mantissa.
pub(crate) fn lead_of(ahead: u64) -> u8 {
    let units = (ahead >> UNIT_BITS) + LEAST_MANTISSA;
    let exponent = units.ilog2() - MANTISSA_BITS;
    let lead = u64::from(exponent) * LEAST_MANTISSA + (units >> exponent) - LEAST_MANTISSA;
    // The lead is less than 250 for every instant, so the conversion does not saturate.
    u8::try_from(lead).unwrap_or(u8::MAX)
}

/// Returns the largest number of microseconds that `lead` can stand for.
fn longest(lead: u8) -> u64 {
    let (exponent, mantissa) = (lead >> MANTISSA_BITS, u64::from(lead) % LEAST_MANTISSA);
    let units = ((mantissa + LEAST_MANTISSA + 1) << exponent) - LEAST_MANTISSA;
    units << UNIT_BITS
}

/// Returns whether a state that ends at `end` and has this lead was written by a clock that was
/// ahead of `now`.
pub(crate) fn is_led(end: u64, lead: u8, now: Timestamp) -> bool {
    end.saturating_sub(now.as_micros()) > longest(lead) + CLOCK_JUMP.as_micros()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tidegate_core::bounds;

    use super::*;

    proptest! {
        #[test]
        fn a_lead_is_rounded_up_by_less_than_an_eighth_and_a_unit(
            ahead in prop_oneof![
                0..1_000_000_u64,
                0..86_400_000_000_u64,
                0..=bounds::MAX_DRAIN.as_micros(),
            ],
        ) {
            let longest = longest(lead_of(ahead));
            prop_assert!(longest > ahead);
            prop_assert!(longest - ahead <= ahead / 8 + (1 << UNIT_BITS), "{longest}");
        }
    }

    #[test]
    fn the_lead_of_every_instant_fits_into_a_byte() {
        assert_eq!(lead_of(0), 0);
        assert!(lead_of(Timestamp::MAX.as_micros()) < u8::MAX);
    }

    /// `lead.lua` and this module must give the same results.
    #[test]
    fn the_scripts_compute_the_same_leads() {
        let lua = mlua::Lua::new();
        let text = include_str!("scripts/lead.lua");
        let test = "return {lead_of(ahead), JUMP, is_from_ahead(later, lead_of(ahead))}";
        for power in 0..52 {
            for ahead in [
                (1_u64 << power) - 1,
                1 << power,
                (1 << power) + (1 << power) / 3,
            ] {
                let bound = longest(lead_of(ahead)) + CLOCK_JUMP.as_micros();
                for (later, is_ahead) in [(bound, false), (bound + 1, true)] {
                    lua.globals().set("ahead", ahead).unwrap();
                    lua.globals().set("later", later).unwrap();
                    let answers: mlua::Table = lua.load(format!("{text}{test}")).eval().unwrap();
                    assert_eq!(
                        answers.get::<u64>(1).unwrap(),
                        lead_of(ahead).into(),
                        "{ahead}"
                    );
                    assert_eq!(answers.get::<u64>(2).unwrap(), CLOCK_JUMP.as_micros());
                    assert_eq!(answers.get::<bool>(3).unwrap(), is_ahead, "{ahead}");
                }
            }
        }
    }
}
