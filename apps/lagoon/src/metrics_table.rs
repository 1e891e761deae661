//! The table of all metrics that this binary's processes export to Prometheus; the HTTP server's are in
//! [`lagoon_http::metrics::METRICS`].
//!
//! The recorder's descriptions and bounds, and docs/reference/metrics.md, are generated from it. Tests compare it with
//! the `counter!`, `gauge!` and `histogram!` calls of this crate, and with the exports of running processes.

use lagoon_http::metrics::{HTTPS, Labels, METRICS as HTTP, Metric, SECONDS, STEP_SECONDS};

/// Values of the label `path`: kinds of paths from a prefill worker.
const PATHS: &[&str] = &["same device", "peer device", "same process", "same host", "quic"];
/// Labels of moved blocks: direction and reason.
const MOVED: Labels = &[
    ("direction", &["out", "home", "between"]),
    ("reason", &["plan", "drain", "operator", "swap", "recall", "swap_out"]),
];

/// Metrics of an instance.
pub(crate) const INSTANCE: &[&[Metric]] =
    &[HTTP, TLS, HTTPS, KV, REQUESTS, PREFIX, REMOTE, MOVES, PREFILL, TRANSFER, CUDA, HOST, LENT];

/// Metrics of a gateway's process.
pub(crate) const OF_GATEWAY: &[&[Metric]] = &[GATEWAY, TLS, HTTPS];

/// Metrics of a gManager's process.
pub(crate) const OF_GMANAGER: &[&[Metric]] = &[GMANAGER, TLS, HTTPS];

/// All tables, each under its title in the reference page.
pub(crate) const ALL: &[(&str, &[Metric])] = &[
    ("HTTP server of an instance", HTTP),
    ("KV memory", KV),
    ("Scheduling, preemption, recovery", REQUESTS),
    ("Prefix cache", PREFIX),
    ("Attention over KV of creditors", REMOTE),
    ("Movement of KV", MOVES),
    ("Prefill elsewhere", PREFILL),
    ("KV transfer", TRANSFER),
    ("CUDA", CUDA),
    ("Host memory tier", HOST),
    ("Mapped device memory", LENT),
    ("Gateway", GATEWAY),
    ("gManager", GMANAGER),
    ("Certificate of a node", TLS),
    ("Certificate of HTTPS", HTTPS),
];

/// The node's certificate.
pub(crate) const TLS: &[Metric] = &[Metric::gauge(
    "lagoon_certificate_expires_timestamp_seconds",
    "seconds",
    &[],
    "When the node's certificate ends, in seconds since 1970; absent without a pool.",
)];

/// KV memory of an instance.
const KV: &[Metric] = &[
    Metric::gauge("lagoon_kv_blocks", "blocks", &[], "rBlocks of this instance."),
    Metric::gauge("lagoon_kv_blocks_free", "blocks", &[], "rBlocks without an owner; free rBlocks may hold cached KV."),
    Metric::gauge(
        "lagoon_kv_blocks_lent",
        "blocks",
        &[],
        "rBlocks lent to other instances; an rBlock in several leases counts once for each.",
    ),
    Metric::gauge(
        "lagoon_kv_blocks_borrowed",
        "blocks",
        &[],
        "rBlocks that the sequences of this instance have on creditors now.",
    ),
    Metric::counter(
        "lagoon_kv_borrowed_blocks_total",
        "blocks",
        &[],
        "rBlocks that creditors have lent to sequences of this instance.",
    ),
    Metric::gauge(
        "lagoon_kv_shared_blocks",
        "blocks",
        &[],
        "rBlocks saved by sharing: how many more would be in use if no two owners shared one.",
    ),
];

/// Scheduling, preemption and recovery.
const REQUESTS: &[Metric] = &[
    Metric::gauge("lagoon_requests_running", "sequences", &[], "Sequences in the batch."),
    Metric::gauge(
        "lagoon_requests_waiting",
        "sequences",
        &[],
        "Sequences that wait for memory, or for a prefill worker to compute their prompt.",
    ),
    Metric::gauge("lagoon_requests_swapped_out", "sequences", &[], "Sequences swapped out to host memory."),
    Metric::counter(
        "lagoon_preemptions_total",
        "preemptions",
        &[("kind", &["recompute", "swap"])],
        "Preemptions: to be recomputed, or swapped out to host memory.",
    ),
    Metric::counter(
        "lagoon_preempted_tokens_total",
        "tokens",
        &[],
        "Tokens whose KV was dropped by a preemption and is recomputed.",
    ),
    Metric::counter(
        "lagoon_recoveries_total",
        "recoveries",
        &[],
        "Times that a sequence lost KV on a creditor and recovered.",
    ),
    Metric::counter("lagoon_recomputed_tokens_total", "tokens", &[], "Tokens recomputed because their KV was lost."),
    Metric::counter("lagoon_drafted_tokens_total", "tokens", &[], "Tokens drafted by speculative decoding."),
    Metric::counter("lagoon_accepted_tokens_total", "tokens", &[], "Drafted tokens that were sampled."),
    Metric::counter(
        "lagoon_warm_up_tokens_total",
        "tokens",
        &[],
        "Tokens computed again for the KV of layers with a window (--kv-groups).",
    ),
    Metric::counter(
        "lagoon_fences_total",
        "fences",
        &[],
        "Times that the gManager declared this instance dead while it lived.",
    ),
    Metric::counter(
        "lagoon_remote_steps_shed_total",
        "steps",
        &[],
        "Steps of remote attention refused to hold --target-tbt-ms.",
    ),
    Metric::counter(
        "lagoon_queries_to_other_hosts_total",
        "frames",
        &[],
        "Frames of queries sent to creditors on other hosts: one for a layer and host where creditors there are asked through one.",
    ),
    Metric::counter(
        "lagoon_query_bytes_to_other_hosts_total",
        "bytes",
        &[],
        "Bytes of those queries; partials of about the same size come back.",
    ),
    Metric::counter(
        "lagoon_relayed_layers_total",
        "layers",
        &[],
        "Layers of other instances' steps for which this one merged the partials of its host's creditors.",
    ),
    Metric::counter(
        "lagoon_relay_failures_total",
        "steps",
        &[],
        "Own steps begun again because one creditor did not answer for its host: they are then asked directly.",
    ),
    Metric::gauge("lagoon_draining", "", &[], "1 while this instance is drained."),
    Metric::counter(
        "lagoon_wire_bytes_sent_total",
        "bytes",
        &[("class", &["control", "partials", "bulk"])],
        "Bytes of frames sent to instances and gManagers, by traffic class.",
    ),
];

/// Prefix cache.
const PREFIX: &[Metric] = &[
    Metric::counter(
        "lagoon_prefix_cache_tokens_total",
        "tokens",
        &[("state", &["looked_up", "hit"])],
        "Prompt tokens looked up in the prefix cache, and those found there.",
    ),
    Metric::counter(
        "lagoon_prefix_cache_hit_tokens_total",
        "tokens",
        &[("where", &["device", "pool", "host", "disk"])],
        "Prompt tokens found in the prefix cache, by where: in KV memory here (device) or leased from other instances (pool), or loaded from host memory or disk.",
    ),
    Metric::counter(
        "lagoon_prefix_cache_saved_milliseconds_total",
        "milliseconds",
        &[],
        "Estimated time that computing the found tokens would have taken, less that of loads from host memory and disk.",
    ),
    Metric::counter(
        "lagoon_prefix_cache_lent_blocks_total",
        "blocks",
        &[],
        "Cached rBlocks leased to other instances for their prefix-cache hits.",
    ),
    Metric::counter(
        "lagoon_joint_prefills_total",
        "prompts",
        &[("result", &["completed", "ended", "alone"])],
        "Own long prompts for which members were asked: computed by all of them, begun and ended early, or not begun.",
    ),
    Metric::counter(
        "lagoon_joint_prefill_tokens_total",
        "tokens",
        &[],
        "Tokens of other instances' prompts computed here, in joint prefill.",
    ),
    Metric::gauge("lagoon_prefix_cache_blocks", "blocks", &[], "Free rBlocks that hold cached KV."),
    Metric::counter(
        "lagoon_prefix_cache_evicted_blocks_total",
        "blocks",
        &[],
        "Cached rBlocks evicted because their memory was needed.",
    ),
    Metric::counter(
        "lagoon_prefix_cache_shared_blocks_total",
        "blocks",
        &[],
        "Prefix-cache hits on rBlocks that another owner was using: shared, not copied.",
    ),
    Metric::gauge(
        "lagoon_prefix_cache_tier_blocks",
        "blocks",
        &[CACHE_TIER],
        "rBlocks whose KV is kept beside the KV memory (--host-cache-tokens, --cache-dir).",
    ),
    Metric::gauge("lagoon_prefix_cache_tier_bytes", "bytes", &[CACHE_TIER], "Bytes of these."),
    Metric::counter(
        "lagoon_prefix_cache_tier_saved_blocks_total",
        "blocks",
        &[CACHE_TIER],
        "Cached rBlocks copied to it.",
    ),
    Metric::counter(
        "lagoon_prefix_cache_tier_evicted_blocks_total",
        "blocks",
        &[CACHE_TIER],
        "rBlocks evicted from it because its bound was reached.",
    ),
    Metric::counter(
        "lagoon_prefix_cache_tier_lost_blocks_total",
        "blocks",
        &[("reason", &["evicted_early", "not_written", "damaged", "missing"])],
        "rBlocks that a tier does not have: evicted from KV memory before they were copied, not written to disk, or found damaged or missing there.",
    ),
    Metric::counter(
        "lagoon_prefix_cache_tier_loads_total",
        "loads",
        &[("end", &["whole", "broken", "declined"])],
        "Prefixes found in a tier: loaded whole, not whole, or computed because that is faster.",
    ),
];

/// Tiers of the prefix cache beside the KV memory.
const CACHE_TIER: (&str, &[&str]) = ("tier", &["host", "disk"]);

/// Attention over KV of creditors.
const REMOTE: &[Metric] = &[
    Metric::counter(
        "lagoon_remote_attentions_total",
        "attentions",
        &[("how", &["mapped", "shipped", "fetched"])],
        "Steps of sequences over KV of a creditor: read in place (mapped), by queries sent (shipped), or after reading the KV (fetched).",
    ),
    Metric::gauge(
        "lagoon_creditors_mapped",
        "creditors",
        &[],
        "Creditors whose device memory this process has mapped.",
    ),
    Metric::counter(
        "lagoon_creditor_maps_refused_total",
        "creditors",
        &[],
        "Times that the device memory of a creditor could not be mapped; queries are sent instead.",
    ),
    Metric::counter(
        "lagoon_steps_reused_memory_total",
        "steps",
        &[],
        "Steps discarded because the creditor had reused mapped memory; the KV is recomputed.",
    ),
    Metric::seconds(
        "lagoon_layer_partials_wait_seconds",
        STEP_SECONDS,
        &[],
        "Time from sending the queries of a layer to the last partial result from its creditors.",
    ),
    Metric::seconds(
        "lagoon_step_partials_wait_seconds",
        STEP_SECONDS,
        &[],
        "Sum of these waits over the layers of a step.",
    ),
];

/// Movement of KV, on the instance that runs the sequence.
const MOVES: &[Metric] = &[
    Metric::gauge("lagoon_moves_in_progress", "moves", &[], "Moves of rBlocks in progress."),
    Metric::gauge(
        "lagoon_move_tokens_per_step",
        "tokens",
        &[],
        "Tokens of KV that move beside one decode step of one growing sequence.",
    ),
    Metric::counter(
        "lagoon_moved_blocks_total",
        "blocks",
        MOVED,
        "rBlocks moved: out to a creditor, home, or between two creditors.",
    ),
    Metric::counter("lagoon_moved_tokens_total", "tokens", MOVED, "Tokens of these rBlocks."),
    Metric::counter("lagoon_moved_bytes_total", "bytes", &[], "Bytes of KV copied by moves."),
    Metric::counter(
        "lagoon_moves_failed_total",
        "moves",
        &[("state", &["refused", "cut_short"])],
        "Moves without room at any target (refused), and moves that ended before all rBlocks had moved (cut_short).",
    ),
    Metric::counter(
        "lagoon_move_blocks_damaged_total",
        "blocks",
        &[],
        "Moved rBlocks whose copy did not match their content hash.",
    ),
    Metric::counter(
        "lagoon_recalls_total",
        "recalls",
        &[("state", &["received", "met", "missed"])],
        "Recalls received from creditors; recalls of this instance that its debtors met or missed.",
    ),
    Metric::counter(
        "lagoon_revoked_blocks_total",
        "blocks",
        &[],
        "rBlocks taken back from debtors after a missed recall.",
    ),
];

/// Prefill and decode on different instances.
const PREFILL: &[Metric] = &[
    Metric::gauge("lagoon_prefill_workers", "instances", &[], "Prefill workers connected to this decode worker."),
    Metric::gauge(
        "lagoon_prefill_away",
        "requests",
        &[],
        "Requests whose prompt is computed on a prefill worker or waits to be read from there.",
    ),
    Metric::gauge(
        "lagoon_prefill_jobs_held",
        "requests",
        &[],
        "Prompts that this prefill worker computes or holds for decode workers.",
    ),
    Metric::gauge("lagoon_prefill_queued_tokens", "tokens", &[], "Tokens of these prompts that are not computed yet."),
    Metric::counter(
        "lagoon_prefill_prompts_total",
        "requests",
        &[("state", &["pulled", "retried", "own"])],
        "Prompts read from a prefill worker (pulled), given to another one (retried), computed here because no prefill worker accepted (own).",
    ),
    Metric::counter(
        "lagoon_prefill_affine_prompts_total",
        "requests",
        &[],
        "Prompts routed to a prefill worker that had computed their beginning.",
    ),
    Metric::counter("lagoon_prefill_affine_tokens_total", "tokens", &[], "Tokens of these beginnings."),
    Metric::counter(
        "lagoon_prefill_jobs_total",
        "requests",
        &[("state", &["done", "refused", "dropped"])],
        "Prompts for decode workers, by outcome.",
    ),
    Metric::seconds(
        "lagoon_prefill_phase_seconds",
        SECONDS,
        &[("phase", &["queue", "prefill", "decode_queue", "transfer", "decode"])],
        "Time of a request by phase (KVDirect, Figure 14).",
    ),
];

/// KV transfer from prefill to decode workers.
const TRANSFER: &[Metric] = &[
    Metric::gauge("lagoon_transfer_stage_blocks_used", "blocks", &[], "rBlocks of the staging buffer in use."),
    Metric::counter(
        "lagoon_transfer_stage_waits_total",
        "requests",
        &[],
        "Prompts that waited for room in the staging buffer.",
    ),
    Metric::counter("lagoon_transfer_reads_total", "reads", &[], "Reads of KV before coalescing."),
    Metric::counter("lagoon_transfer_transactions_total", "reads", &[], "Reads of KV after coalescing."),
    Metric::counter("lagoon_transfer_bytes_total", "bytes", &[], "Bytes of KV read from prefill workers."),
    Metric::counter(
        "lagoon_transfer_bytes_found_total",
        "bytes",
        &[],
        "Bytes of KV not read because the prefix cache of this instance had them.",
    ),
    Metric::counter(
        "lagoon_transfer_busy_microseconds_total",
        "microseconds",
        &[],
        "Time with at least one read in flight; lagoon_transfer_bytes_total over it is the rate.",
    ),
    Metric::counter(
        "lagoon_transfer_blocks_damaged_total",
        "blocks",
        &[],
        "rBlocks that arrived with a wrong checksum.",
    ),
    Metric::gauge(
        "lagoon_transfer_path_bytes_per_second",
        "bytes per second",
        &[("worker", &[]), ("path", PATHS)],
        "Bandwidth of the path to a prefill worker, measured when it was opened.",
    ),
    Metric::counter("lagoon_transfer_path_bytes_total", "bytes", &[("path", PATHS)], "Bytes of KV read, by path."),
    Metric::gauge(
        "lagoon_transfer_regions_mapped",
        "instances",
        &[],
        "Prefill workers whose device memory this process has mapped.",
    ),
    Metric::counter(
        "lagoon_transfer_regions_refused_total",
        "instances",
        &[],
        "Times that the device memory of a prefill worker could not be mapped; its KV is read through the host.",
    ),
];

/// Virtual memory and launches (CUDA backend only).
const CUDA: &[Metric] = &[
    Metric::gauge(
        "lagoon_kv_page_groups",
        "page groups",
        &[("state", &["free", "kept"])],
        "Page groups that are not mapped (free), or still mapped for the next sequence (kept).",
    ),
    Metric::counter(
        "lagoon_kv_page_groups_mapped_total",
        "page groups",
        &[("when", &["in_step", "ahead", "eager", "shared"])],
        "Page groups mapped while a step waited (in_step), one step ahead (ahead), before the next sequence came (eager), for a shared prefix (shared).",
    ),
    Metric::counter(
        "lagoon_kv_page_groups_reused_total",
        "page groups",
        &[],
        "Page groups that were still mapped at the address where they were needed.",
    ),
    Metric::counter(
        "lagoon_kv_page_groups_reclaimed_total",
        "page groups",
        &[],
        "Kept page groups that were unmapped because free ones ran short.",
    ),
    Metric::counter(
        "lagoon_kv_mappings_refused_total",
        "mappings",
        &[],
        "Mappings refused because no page group was left.",
    ),
    Metric::counter(
        "lagoon_steps_launched_total",
        "steps",
        &[("how", &["eager", "captured", "replayed"])],
        "Steps without remote KV: launched kernel by kernel, captured as a CUDA graph, or replayed.",
    ),
    Metric::counter("lagoon_graphs_evicted_total", "graphs", &[], "CUDA graphs evicted to make room for others."),
];

/// Host memory tier (--host-kv-tokens).
const HOST: &[Metric] = &[
    Metric::gauge("lagoon_host_kv_blocks", "blocks", &[], "rBlocks in host memory."),
    Metric::gauge("lagoon_host_kv_blocks_free", "blocks", &[], "rBlocks in host memory without an owner."),
    Metric::gauge(
        "lagoon_host_kv_blocks_lent",
        "blocks",
        &[],
        "rBlocks in host memory lent to instances, this one included, by lease.",
    ),
];

/// Device memory lent to be mapped (--lend-device-tokens).
const LENT: &[Metric] = &[
    Metric::gauge("lagoon_lent_kv_blocks", "blocks", &[], "rBlocks that debtors on this host may map."),
    Metric::gauge("lagoon_lent_kv_blocks_free", "blocks", &[], "rBlocks of these without an owner."),
    Metric::gauge(
        "lagoon_lent_kv_blocks_lent",
        "blocks",
        &[],
        "rBlocks of these lent to instances, this one included, by lease.",
    ),
    Metric::counter(
        "lagoon_lent_kv_blocks_sealed_total",
        "blocks",
        &[],
        "rBlocks of these sealed, so that their debtor may read them in place.",
    ),
];

pub(crate) const GATEWAY_REQUESTS: Metric = Metric::counter(
    "lagoon_gateway_requests_total",
    "requests",
    &[("instance", &[]), ("status", &[])],
    "Requests by instance and HTTP status; status `lost` with the instance, `went_on` after another was lost.",
);

pub(crate) const GATEWAY_RETRIES: Metric = Metric::counter(
    "lagoon_gateway_retries_total",
    "requests",
    &[("instance", &[])],
    "Attempts that did not reach the instance.",
);

pub(crate) const GATEWAY_SCRAPE_FAILURES: Metric = Metric::counter(
    "lagoon_gateway_scrape_failures_total",
    "scrapes",
    &[("instance", &[])],
    "Times that the metrics of an instance were left out of this page: no answer in time, or no valid one.",
);

pub(crate) const GATEWAY_SCRAPED: Metric = Metric::gauge(
    "lagoon_gateway_instance_scraped",
    "",
    &[("instance", &[])],
    "1 if this page has the metrics of the instance, 0 if they are left out.",
);

/// The gateway (`lagoon up`, `lagoon gateway`).
pub(crate) const GATEWAY: &[Metric] = &[
    GATEWAY_REQUESTS,
    GATEWAY_RETRIES,
    GATEWAY_SCRAPE_FAILURES,
    GATEWAY_SCRAPED,
    Metric::counter(
        "lagoon_gateway_replays_total",
        "requests",
        &[("state", &["begun", "done", "failed"])],
        "Streams continued on another instance; failed: the client got an error.",
    ),
    Metric::gauge(
        "lagoon_gateway_requests_waiting",
        "requests",
        &[],
        "Requests that wait for an instance that can start them.",
    ),
    Metric::seconds("lagoon_gateway_wait_seconds", SECONDS, &[], "Time that a request waited for that."),
    Metric::counter(
        "lagoon_gateway_refused_total",
        "requests",
        &[("reason", &["full", "tenant_full", "expired", "no_instance"])],
        "Requests that the queue refused.",
    ),
    Metric::counter(
        "lagoon_gateway_handed_back_total",
        "requests",
        &[],
        "Requests that an instance gave back before it began them.",
    ),
    Metric::counter(
        "lagoon_gateway_passes_total",
        "requests",
        &[],
        "Requests started on memory for which one ahead of them waited.",
    ),
];

/// The gManager (`--metrics-port`).
pub(crate) const GMANAGER: &[Metric] = &[
    Metric::gauge("lagoon_gmanager_leads", "", &[], "1 while this gManager leads, 0 while it stands by."),
    Metric::gauge("lagoon_gmanager_term", "", &[], "Term in which this gManager leads; 0 while it stands by."),
    Metric::gauge(
        "lagoon_gmanager_instances",
        "instances",
        &[("state", &["alive", "draining", "silent"])],
        "Instances of the pool by state.",
    ),
    Metric::counter("lagoon_gmanager_rounds_total", "rounds", &[], "Planning rounds."),
    Metric::seconds("lagoon_gmanager_round_seconds", SECONDS, &[], "Time of a planning round."),
    Metric::counter(
        "lagoon_gmanager_moves_total",
        "orders",
        &[("state", &["given", "done", "failed"])],
        "Orders to move KV; failed: in part or whole.",
    ),
    Metric::counter("lagoon_gmanager_blocks_moved_total", "blocks", &[], "rBlocks moved by order."),
    Metric::counter("lagoon_gmanager_fenced_total", "instances", &[], "Instances declared dead."),
    Metric::counter("lagoon_gmanager_refusals_total", "refusals", &[], "Refusals of creditors that debtors reported."),
    Metric::counter(
        "lagoon_gmanager_cycles_total",
        "cycles",
        &[("state", &["found", "completed", "aborted"])],
        "Debt cycles handled by DGFM.",
    ),
    Metric::counter("lagoon_gmanager_cycle_blocks_total", "blocks", &[], "rBlocks brought home from debt cycles."),
    Metric::counter(
        "lagoon_role_switches_total",
        "switches",
        &[
            ("from", &["instance", "prefill", "decode"]),
            ("to", &["instance", "prefill", "decode"]),
            ("by", &["operator", "auto"]),
        ],
        "Role changes ordered, by the operator or by the balancer.",
    ),
];
