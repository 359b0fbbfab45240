//! Charging several slots of a cluster, or none of them; `apart.rs` says what is sound about it.

use futures_util::future::join_all;

use crate::{RedisStore, StoreError, call::Call, decode::Checked, scripts};

/// A question to a slot, about so many charges.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) call: Call,
    pub(crate) charges: usize,
}

impl RedisStore {
    /// Charges every slot, or none: those that admit give back where others do not.
    pub(crate) async fn reserve(&self, questions: Vec<Asked>) -> Result<Vec<Checked>, StoreError> {
        // A task of its own, so that it comes to its end when nobody waits for it any more.
        let task = tokio::spawn(all_or_none(self.clone(), questions));
        let ended = |_| StoreError::Unknown("the runtime came to its end".to_owned());
        task.await.map_err(ended)?.into_iter().collect()
    }
}

impl Asked {
    pub(crate) async fn put(&self, store: &RedisStore) -> Result<Checked, StoreError> {
        store.put(&self.call, self.charges).await
    }

    /// What gives back what these receipts say.
    fn give_back(&self, receipts: &[Vec<u8>]) -> Call {
        let [instant, _, _, programs @ ..] = self.call.args.as_slice() else {
            unreachable!("a question has an instant, an intent and a slack");
        };
        let mut args = vec![instant.clone()];
        for (program, receipt) in programs.iter().zip(receipts) {
            args.extend([program.clone(), receipt.clone()]);
        }
        Call {
            script: &scripts::GIVE_BACK,
            keys: self.call.keys.clone(),
            args,
        }
    }
}

/// Charges every slot, and lets those that admit give back where others do not.
async fn all_or_none(store: RedisStore, questions: Vec<Asked>) -> Vec<Result<Checked, StoreError>> {
    let replies = join_all(questions.iter().map(|asked| asked.put(&store))).await;
    let asked_and_replied = questions.iter().zip(&replies);
    let mut reserved: Vec<Call> = asked_and_replied
        .filter_map(|(asked, reply)| match reply {
            Ok(Checked::Decided {
                admitted: true,
                receipts,
                ..
            }) => Some(asked.give_back(receipts)),
            _ => None,
        })
        .collect();
    if reserved.len() == replies.len() {
        reserved.clear();
    }
    for answer in join_all(reserved.iter().map(|call| store.run(call))).await {
        if let Err(trouble) = answer {
            tracing::debug!("what is denied elsewhere may stay charged: {trouble}");
        }
    }
    replies
}

#[cfg(test)]
mod tests;
