//! Metrics of the memory store.

use tidegate_core::MemoryStats;
use tidegate_net::prometheus::{Metric, Page, count};

const KEYS: Metric = Metric::gauge("tidegate_keys", [], "Keys in the store.");
const BYTES: Metric = Metric::gauge(
    "tidegate_store_bytes",
    [],
    "Memory used by the store, in bytes.",
);
const LEDGER_BYTES: Metric = Metric::gauge(
    "tidegate_refund_ledger_bytes",
    [],
    "Memory used by the refund ledger, in bytes.",
);
const BLOCKS: Metric = Metric::gauge("tidegate_blocks", [], "Active manual blocks.");
const EXPIRED: Metric = Metric::counter(
    "tidegate_keys_expired_total",
    [],
    "Keys removed because they had expired.",
);
const EVICTED: Metric = Metric::counter(
    "tidegate_keys_evicted_total",
    [],
    "Live keys evicted to make room.",
);
const FULL: Metric<1> = Metric::counter(
    "tidegate_store_full_total",
    ["outcome"],
    "Charges for which no memory was free for a new key or a larger sliding window log, by outcome.",
);

pub(super) fn collect(store: &MemoryStats, page: &mut Page<'_>) {
    page.single(&KEYS, count(store.keys));
    page.single(&BYTES, count(store.bytes));
    page.single(&LEDGER_BYTES, count(store.ledger_bytes));
    page.single(&BLOCKS, count(store.blocks));
    page.single(&EXPIRED, store.expired);
    page.single(&EVICTED, store.evicted);
    let full = [
        (["denied"], store.denied_when_full),
        (["allowed"], store.admitted_when_full),
    ];
    page.family(&FULL, full);
}
