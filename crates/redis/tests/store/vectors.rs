//! Runs the shared test vectors on every server.

#[path = "../../../core/tests/vectors/compare.rs"]
mod compare;
#[path = "../../../core/tests/vectors/folder.rs"]
mod folder;
#[path = "../../../core/tests/vectors/format.rs"]
mod format;
#[path = "../../../core/tests/vectors/prediction.rs"]
mod prediction;
#[path = "../../../core/tests/vectors/runner.rs"]
mod runner;

use tidegate_core::{Charge, Span, Timestamp, Verdict};
use tidegate_redis::{RedisStore, StoreError};
use tokio::runtime::Runtime;

use self::{
    prediction::Instants,
    runner::{Answer, Ask, Subject},
};
use crate::server::Server;

#[test]
fn vectors_hold_in_redis() {
    hold_in(&Server::redis());
}

#[test]
fn vectors_hold_in_valkey() {
    hold_in(&Server::valkey());
}

fn hold_in(server: &Server) {
    let runtime = crate::runtime();
    let connected = runtime.block_on(RedisStore::connect(&server.url(), "tg"));
    let store = connected.unwrap();
    folder::run(|_| Shared {
        runtime: &runtime,
        store: store.unpinned(),
    })
    .assert_success();
}

struct Shared<'r> {
    runtime: &'r Runtime,
    store: RedisStore,
}

impl Shared<'_> {
    fn answered<T>(
        &self,
        answer: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, String> {
        self.runtime
            .block_on(answer)
            .map_err(|error| error.to_string())
    }
}

impl Subject for Shared<'_> {
    const INSTANTS: Instants = Instants::Halving;

    fn answer(&mut self, ask: &Ask<'_>) -> Result<Answer, String> {
        let charge = Charge::new(ask.key.as_bytes(), ask.limits, ask.cost)
            .map_err(|problem| problem.to_string())?;
        self.store.pin_clock(ask.now);
        let mut outcomes = Vec::new();
        let decision = self.answered(self.store.check(&[charge], ask.effect, &mut outcomes))?;
        Ok(Answer::of(&Verdict::of(&decision, &[charge], &outcomes)))
    }

    fn block(&mut self, key: &str, span: Span, now: Timestamp) -> Result<(), String> {
        self.store.pin_clock(now);
        let blocked = self.answered(self.store.block(key.as_bytes(), Some(span), "by hand"))?;
        blocked.then_some(()).ok_or_else(|| "no room".to_owned())
    }

    fn unblock(&mut self, key: &str, now: Timestamp) -> Result<(), String> {
        self.store.pin_clock(now);
        self.answered(self.store.unblock(key.as_bytes())).map(drop)
    }

    fn reset(&mut self, key: &str, now: Timestamp) -> Result<(), String> {
        self.store.pin_clock(now);
        self.answered(self.store.reset(key.as_bytes())).map(drop)
    }
}
