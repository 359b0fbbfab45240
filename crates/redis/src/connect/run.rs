//! Runs script calls on any topology.

use std::pin::Pin;

use futures_util::future::join_all;

use super::{
    Redis, Routes,
    link::{Fate, Order},
};
use crate::{
    call::{Call, Reply},
    exec::{self, Exec, ExecError, Replies, Text},
};

impl Exec for Redis {
    fn run<'a>(&'a self, calls: &'a [Call]) -> Pin<Box<dyn Future<Output = Replies> + Send + 'a>> {
        Box::pin(async move {
            match calls {
                [call] => vec![self.call(call).await],
                // Calls that are queued at the same time are sent in the same batch.
                calls => join_all(calls.iter().map(|call| self.call(call))).await,
            }
        })
    }

    fn is_slotted(&self) -> bool {
        matches!(self.routes, Routes::Many(_))
    }
}

impl Redis {
    async fn call(&self, call: &Call) -> Result<Reply, ExecError> {
        let key = call.keys.first().map_or(&[][..], Vec::as_slice);
        let order = |text| Order {
            command: exec::command(call, text),
            on_late_reply: call.on_late_reply.clone(),
        };
        let mut answer = self.ask(key, order(Text::BySha)).await;
        if answer.as_ref().is_ok_and(exec::is_no_script) {
            // `NOSCRIPT` means that the script did not run. `EVAL` runs it, and the server knows
            // the script from then on.
            answer = self.ask(key, order(Text::InFull)).await;
        }
        match answer {
            Ok(value) => exec::read(value),
            Err(Fate::NotSent) => Err(ExecError::NotExecuted(self.why_not_sent())),
            Err(Fate::Unknown) => Err(ExecError::Unknown(
                "the request was sent, but no reply arrived in time".to_owned(),
            )),
        }
    }

    fn why_not_sent(&self) -> String {
        match self.health().trouble {
            Some(trouble) => trouble.to_string(),
            None => "too many requests are waiting, or the connection was just lost".to_owned(),
        }
    }
}
