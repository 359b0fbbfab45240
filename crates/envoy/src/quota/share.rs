//! Divides an integer number of requests into integer shares that add up to exactly this number.

/// The fraction 1/`FLOOR` of the total is divided evenly, regardless of the demands, so that a new
/// stream gets a minimum share.
pub const FLOOR: u64 = 10;

/// The maximum demand. The maximum prevents overflows in multiplications.
const MAX_DEMAND: u64 = 1 << 40;

/// Divides `total` among the streams with these `demands` and a number of `vacant` places. The
/// share of a vacant place is reserved for a new stream. In the result, the shares of the vacant
/// places come last.
///
/// The fraction 1/[`FLOOR`] of the total is divided evenly among all streams and vacant places. The
/// rest is divided in proportion to the demands. If every demand is zero, the rest is divided
/// evenly among the streams. Each share is rounded down, and the streams and vacant places that
/// lost most by rounding get one of the remaining requests each. If two losses are equal, the first
/// stream or vacant place gets the remaining request.
///
/// If there is at least one stream or vacant place, the shares add up to exactly `total`. A stream
/// with a higher demand never gets a smaller share than a stream with a lower demand, except that
/// all demands from 2^40 count as equal. Each share is at least `total / (FLOOR * n)`, rounded
/// down, where `n` is the number of streams and vacant places. Without streams and vacant places,
/// the result is empty.
#[must_use]
pub fn divide(total: u64, demands: &[u64], vacant: usize) -> Vec<u64> {
    let weights = weights(demands, vacant);
    let whole: u128 = weights.iter().sum();
    if whole == 0 {
        return Vec::new();
    }
    let exact = |weight: &u128| u128::from(total) * weight;
    // A share cannot exceed the total.
    let mut shares: Vec<u64> = weights
        .iter()
        .map(|weight| u64::try_from(exact(weight) / whole).unwrap_or(total))
        .collect();
    let remainder = total - shares.iter().sum::<u64>();
    let mut by_loss: Vec<usize> = (0..shares.len()).collect();
    by_loss.sort_by_key(|&at| std::cmp::Reverse(exact(&weights[at]) % whole));
    // Rounding takes less than one request from each share, so the remainder is smaller than the
    // number of shares.
    for (at, _) in by_loss.into_iter().zip(0..remainder) {
        shares[at] += 1;
    }
    shares
}

/// Returns the weight of each stream and vacant place as a numerator over a common denominator. A
/// stream's weight is the sum of an even share, which is the same for every stream, and a share in
/// proportion to the stream's demand.
fn weights(demands: &[u64], vacant: usize) -> Vec<u128> {
    let no_demand = demands.iter().all(|&demand| demand == 0);
    let demand = |&demand: &u64| u128::from(if no_demand { 1 } else { demand.min(MAX_DEMAND) });
    let all: u128 = demands.iter().map(demand).sum::<u128>().max(1);
    let seats = demands.len() + vacant;
    let rest = u128::from(FLOOR - 1) * seats as u128;
    let occupied = demands.iter().map(|seat| demand(seat) * rest + all);
    occupied.chain(std::iter::repeat_n(all, vacant)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    #[test]
    fn shares_follow_demand_above_an_even_floor() {
        assert_eq!(divide(100, &[1, 1], 0), [50, 50]);
        assert_eq!(
            divide(100, &[30, 10], 0),
            [73, 27],
            "5 each, and 90 divided 3 to 1"
        );
        assert_eq!(divide(100, &[7, 0], 0), [95, 5]);
        assert_eq!(divide(100, &[0, 0, 0], 0), [34, 33, 33]);
        assert_eq!(divide(100, &[7], 1), [95, 5]);
        assert_eq!(divide(100, &[], 1), [100]);
        assert_eq!(divide(1, &[1, 1, 1], 0), [1, 0, 0]);
        assert_eq!(divide(0, &[5, 1], 0), [0, 0]);
        assert!(
            divide(100, &[], 0).is_empty(),
            "there is no stream to take it"
        );
    }

    fn demand() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0), 0..1_000_u64, any::<u64>()]
    }

    fn total() -> impl Strategy<Value = u64> {
        prop_oneof![0..20_u64, 0..100_000_u64, any::<u64>()]
    }

    proptest! {
        #[test]
        fn shares_add_up_exactly(
            total in total(),
            demands in vec(demand(), 0..40),
            vacant in 0..3_usize,
        ) {
            prop_assume!(!demands.is_empty() || vacant > 0);
            let shares = divide(total, &demands, vacant);
            prop_assert_eq!(shares.len(), demands.len() + vacant);
            let sum: u128 = shares.iter().map(|&share| u128::from(share)).sum();
            prop_assert_eq!(sum, u128::from(total));
        }

        #[test]
        fn every_stream_gets_the_minimum_share(
            total in total(),
            demands in vec(demand(), 1..40),
            vacant in 0..3_usize,
        ) {
            let seats = (demands.len() + vacant) as u64;
            for share in divide(total, &demands, vacant) {
                prop_assert!(share >= total / (FLOOR * seats));
            }
        }

        #[test]
        fn more_demand_never_gets_a_smaller_share(
            total in total(),
            demands in vec(demand(), 2..40),
        ) {
            let shares = divide(total, &demands, 0);
            for (a, share_a) in demands.iter().zip(&shares) {
                for (b, share_b) in demands.iter().zip(&shares) {
                    // If demands are equal, the first stream may get one request more. All demands
                    // above `MAX_DEMAND` count as equal.
                    prop_assert!(a < b || share_a + 1 >= *share_b, "{a} {share_a} {b} {share_b}");
                }
            }
        }

        #[test]
        fn equal_demands_differ_by_at_most_one(
            total in total(),
            seats in 1..40_usize,
            demand in demand(),
        ) {
            let shares = divide(total, &vec![demand; seats], 0);
            let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
            prop_assert!(most - least <= 1);
        }
    }
}
