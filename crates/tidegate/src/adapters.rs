//! Adapters that rate limit a stream or an iterator.

use std::{error::Error, fmt};

#[cfg(feature = "tokio")]
use futures_core::Stream;
#[cfg(feature = "tokio")]
use tidegate_core::Store;
use tidegate_core::{MemoryStore, Timestamp};

#[cfg(feature = "tokio")]
use crate::timer::TokioTimer;
use crate::{AcquireError, BlockingStore, Key, Limiter};

/// An item that was not admitted. The item can never be admitted, or too many requests are waiting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimitError<T> {
    /// The item.
    pub item: T,
    /// The reason why the item was not admitted.
    pub error: AcquireError,
}

impl<T> fmt::Display for RateLimitError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T: fmt::Debug> Error for RateLimitError<T> {}

/// Rate limits a stream.
///
/// # Examples
///
/// ```
/// use futures_util::{StreamExt as _, stream};
/// use tidegate::{Limit, Limiter, StreamRateLimit as _};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::in_memory("100/s burst 20".parse::<Limit>()?);
/// let jobs = stream::iter(1..=3).rate_limited(&limiter, "jobs");
/// let done: Result<Vec<u32>, _> = jobs.collect::<Vec<_>>().await.into_iter().collect();
/// assert_eq!(done?, [1, 2, 3]);
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "tokio")]
pub trait StreamRateLimit: Stream + Sized {
    /// Returns a stream of the same items. Each item waits until `key` admits it, for as long as
    /// the limit requires. Of the limiter's [`WaitBounds`](crate::WaitBounds), only the maximum
    /// numbers of waiting requests apply. The longest wait of the limiter does not apply.
    ///
    /// If the stream is dropped, a waiting item is dropped with it and is not charged.
    fn rate_limited<'a, S, K>(
        self,
        limiter: &'a Limiter<S>,
        key: K,
    ) -> impl Stream<Item = Result<Self::Item, RateLimitError<Self::Item>>> + use<'a, Self, S, K>
    where
        Self: 'a,
        S: Store,
        K: Key + Clone + 'a,
    {
        futures_util::StreamExt::then(self, move |item| {
            let acquired = limiter.acquire_by(key.clone(), Timestamp::MAX, &TokioTimer);
            async move {
                match acquired.await {
                    Ok(_) => Ok(item),
                    Err(error) => Err(RateLimitError { item, error }),
                }
            }
        })
    }
}

#[cfg(feature = "tokio")]
impl<T: Stream> StreamRateLimit for T {}

/// Rate limits an iterator. The thread is blocked when an item has to wait.
///
/// # Examples
///
/// ```
/// use tidegate::{IteratorRateLimit as _, Limit, Limiter};
///
/// let limiter = Limiter::in_memory("100/s burst 20".parse::<Limit>()?);
/// let done: Result<Vec<u32>, _> = (1..=3).rate_limited(&limiter, "jobs").collect();
/// assert_eq!(done?, [1, 2, 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait IteratorRateLimit: Iterator + Sized {
    /// Returns an iterator over the same items. Each item waits until `key` admits it, for as long
    /// as the limit requires. Of the limiter's [`WaitBounds`](crate::WaitBounds), only the maximum
    /// numbers of waiting requests apply. The longest wait of the limiter does not apply.
    fn rate_limited<S: BlockingStore, K: Key + Clone>(
        self,
        limiter: &Limiter<S>,
        key: K,
    ) -> RateLimited<'_, Self, K, S> {
        RateLimited {
            items: self,
            limiter,
            key,
        }
    }
}

impl<I: Iterator> IteratorRateLimit for I {}

/// A rate-limited iterator. See [`IteratorRateLimit`].
#[derive(Debug)]
pub struct RateLimited<'a, I, K, S = MemoryStore> {
    items: I,
    limiter: &'a Limiter<S>,
    key: K,
}

impl<I: Iterator, K: Key + Clone, S: BlockingStore> Iterator for RateLimited<'_, I, K, S> {
    type Item = Result<I::Item, RateLimitError<I::Item>>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = self.items.next()?;
        let acquired = self
            .limiter
            .acquire_blocking_by(self.key.clone(), Timestamp::MAX);
        Some(match acquired {
            Ok(_) => Ok(item),
            Err(error) => Err(RateLimitError { item, error }),
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.items.size_hint()
    }
}
