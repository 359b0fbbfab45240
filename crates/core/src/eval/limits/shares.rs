//! A cache for a node's shares of the limits. Each share of the limits is compiled once.

use std::sync::{Arc, OnceLock};

use super::Limits;
use crate::eval::FallbackShare;

/// The maximum number of cached shares per rule. A rule has a share for each number of servers that
/// the cluster has had. A share that does not fit in the cache is compiled again on every call.
const MAX_SHARES: usize = 256;

/// A linked list of cached shares. The list only grows, so decisions can read it without a lock.
#[derive(Debug, Default)]
pub(super) struct ShareCache(OnceLock<Box<CachedShare>>);

#[derive(Debug)]
struct CachedShare {
    share: FallbackShare,
    limits: Arc<Limits>,
    next: ShareCache,
}

impl ShareCache {
    /// Returns the limits for `share`, which `build` creates on first use.
    pub(super) fn get(&self, share: FallbackShare, build: impl Fn() -> Limits) -> Arc<Limits> {
        let mut shares = self;
        for _ in 0..MAX_SHARES {
            let cached = shares.0.get_or_init(|| {
                Box::new(CachedShare {
                    share,
                    limits: Arc::new(build()),
                    next: Self::default(),
                })
            });
            // Another thread may have stored a different share in this list element first.
            if cached.share == share {
                return Arc::clone(&cached.limits);
            }
            shares = &cached.next;
        }
        Arc::new(build())
    }
}

/// A clone starts with an empty cache, because its limits are usually changed after cloning.
impl Clone for ShareCache {
    fn clone(&self) -> Self {
        Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlgorithmName, LimitSpec, notation};

    #[test]
    fn each_share_is_built_once_and_kept_when_the_server_count_changes() {
        let rate = notation::rate("300/min").unwrap();
        let limit = LimitSpec::shorthand(rate, AlgorithmName::SlidingWindowLog).build();
        let limits = Limits::new(vec![limit.unwrap()]).unwrap();
        let quota = |limits: &Limits| limits.iter().next().map(|limit| limit.quota());
        let of = |servers| limits.share(FallbackShare::one_of(servers).unwrap());
        let first: Vec<_> = (1..=5).map(of).collect();
        for (servers, cached) in (1..=5).zip(&first) {
            assert!(Arc::ptr_eq(cached, &of(servers)), "{servers}");
            assert_eq!(quota(cached), Some(300 / u64::from(servers)));
        }
        let many = u32::try_from(MAX_SHARES).unwrap() + 10;
        for servers in 1..=many {
            assert_eq!(quota(&of(servers)), Some((300 / u64::from(servers)).max(1)));
        }
    }
}
