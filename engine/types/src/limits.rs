//! Every bound of the system in one place, with its unit last in the name. Relations between bounds are checked at
//! compile time below.

/// Tokens in one rBlock unless the pool says otherwise.
pub const BLOCK_TOKENS_DEFAULT: u32 = 32;
/// Largest rBlock, in tokens.
pub const BLOCK_TOKENS_MAX: u32 = 1024;
/// Longest sequence, in tokens (positions are u32; two million leaves headroom in every product).
pub const SEQUENCE_TOKENS_MAX: u32 = 1 << 21;
/// Largest vocabulary, in tokens.
pub const VOCAB_MAX: u32 = 1 << 20;
/// Widest residual stream, in elements.
pub const HIDDEN_MAX: u32 = 1 << 16;
/// Widest feed-forward layer, in elements.
pub const INTERMEDIATE_MAX: u32 = 1 << 18;
/// Most decoder layers.
pub const LAYERS_MAX: u32 = 1 << 10;
/// Most attention heads.
pub const HEADS_MAX: u32 = 1 << 10;
/// Largest attention head, in elements.
pub const HEAD_DIM_MAX: u32 = 1 << 10;
/// Rows (tokens) of one step by default.
pub const STEP_ROWS_DEFAULT: usize = 512;
/// Rows (tokens) of one step at most.
pub const STEP_ROWS_MAX: usize = 8192;
/// Sequences that run at once on one instance by default.
pub const RUNNING_DEFAULT: usize = 64;
/// Requests that wait for admission by default.
pub const QUEUE_DEFAULT: usize = 256;
/// Creditors that one sequence may borrow from.
pub const CREDITORS_MAX: usize = 64;
/// Candidates that the gManager recommends at once (v1 §4.4).
pub const CANDIDATES: usize = 3;
/// Rounds of asking the gManager again before a borrow fails.
pub const BORROW_ROUNDS_MAX: u32 = 8;

/// Largest control frame, in bytes.
pub const CONTROL_FRAME_BYTES_MAX: usize = 1 << 20;
/// Largest partials or bulk frame, in bytes. Larger payloads are split.
pub const DATA_FRAME_BYTES_MAX: usize = 64 << 20;
/// Frames that wait for one peer and class before senders are pushed back.
pub const PEER_QUEUE_FRAMES_MAX: usize = 1024;
/// Bytes that wait for one peer and class before senders are pushed back.
pub const PEER_QUEUE_BYTES_MAX: usize = 256 << 20;
/// Largest transport preface, in bytes.
pub const PREFACE_BYTES_MAX: usize = 1 << 10;
/// Sequences in one step ticket.
pub const TICKET_SEQS_MAX: usize = 1024;
/// Lease runs in one step ticket, over all its sequences.
pub const TICKET_RUNS_MAX: usize = 16 << 10;
/// Text for people in a refusal, in bytes; longer text is cut when it is encoded.
pub const DETAIL_BYTES_MAX: usize = 1 << 10;
/// Instances in one pool.
pub const INSTANCES_MAX: usize = 16 << 10;
/// Waiting requests whose needs a heartbeat tells.
pub const LOAD_QUEUE_MAX: usize = 32;

/// Rows of the request placement map in one heartbeat; what is beyond follows in the next ones.
pub const HEARTBEAT_ROWS_MAX: usize = 16 << 10;
/// Measured links in one heartbeat.
pub const HEARTBEAT_LINKS_MAX: usize = 64;
/// Rows of the request placement map that an operator is shown at once.
pub const ADMIN_ROWS_MAX: usize = 8 << 10;
/// Operators' orders whose outcome a gManager remembers.
pub const ADMIN_ORDERS_MAX: usize = 1 << 10;
/// Orders to move KV that are in progress at once in a pool.
pub const MOVES_MAX: usize = 16 << 10;

/// Time between heartbeats.
pub const HEARTBEAT_MS: u64 = 250;
/// An instance that is silent for this long is not recommended any more.
pub const HEARTBEAT_STALE_MS: u64 = 2_000;
/// An instance that is silent for this long is fenced: what it lent is written off, what it borrowed is freed.
pub const FENCE_MS: u64 = 6_000;
/// Time after which a fence is told again, until [`LEASE_TTL_MS`] after it: leases have ended by themselves then.
pub const FENCE_REPEAT_MS: u64 = 1_000;
/// The gManager heard nobody for so long: it slept, and nobody is fenced for it.
pub const GMANAGER_PAUSE_MS: u64 = 1_000;
/// Time between two orders of the gManager's view of creditors; small pools are sorted at every change.
pub const VIEW_MS: u64 = 50;
/// A request that only the pool can hold goes before all younger ones after so long.
pub const OLDEST_WAITING_MS: u64 = 10_000;
/// What an instance heard of such a request holds for so long.
pub const OLDEST_WAITING_HOLD_MS: u64 = 1_000;
/// Time between planning rounds.
pub const PLAN_MS: u64 = 1_000;
/// Time that a round waits for heartbeats that are missing.
pub const PLAN_WAIT_MS: u64 = 500;
/// Time that an order to move KV may take.
pub const MOVE_DEADLINE_MS: u64 = 10_000;
/// Time after that until the gManager gives its outcome up.
pub const MOVE_GRACE_MS: u64 = 2_000;
/// A request that was moved is left alone for so long.
pub const MOVE_REST_MS: u64 = 1_000;
/// The same after a move that failed; doubled by each further one up to the next bound.
pub const MOVE_RETRY_MS: u64 = 2_000;
/// See [`MOVE_RETRY_MS`].
pub const MOVE_RETRY_MAX_MS: u64 = 32_000;
/// What an operator moved is left alone by the planner for so long.
pub const MOVE_BY_HAND_REST_MS: u64 = 10_000;
/// Time between two looks at what is left on an instance that is drained.
pub const DRAIN_MS: u64 = 500;
/// A drained instance that had nothing to do for so long may stop: dispatchers have heard of the drain by then.
pub const DRAIN_QUIET_MS: u64 = 2_000;
/// A lease that is not renewed for this long is released by the creditor.
pub const LEASE_TTL_MS: u64 = 15_000;
/// Time between renewals of leases.
pub const LEASE_RENEW_MS: u64 = 3_000;
/// A step that waits longer for a peer's partials fails its sequences.
pub const STEP_DEADLINE_MS: u64 = 10_000;
/// A device that finishes no layer of a step for so long hangs: the process ends, so that others take over its requests.
pub const DEVICE_STUCK_MS: u64 = 120_000;
/// Time that a borrow may take, rounds included, before the request goes back to waiting.
pub const BORROW_DEADLINE_MS: u64 = 5_000;
/// Time that a creditor may take to answer a lease request before the next candidate is tried.
pub const LEASE_ANSWER_MS: u64 = 1_500;
/// Time after which an unanswered borrow query or release is sent again.
pub const CONTROL_REPEAT_MS: u64 = 1_000;
/// An instance that is silent for this long leaves the gManager's books.
pub const INSTANCE_FORGET_MS: u64 = 60_000;
/// Time that a request may wait for admission.
pub const ADMISSION_DEADLINE_MS: u64 = 600_000;
/// Steps of peers that are open at once on one creditor.
pub const REMOTE_REQUEST_TICKETS_MAX: usize = 1024;
/// Frames of peers that wait for KV or are on the device at once on one creditor.
pub const REMOTE_REQUEST_WAITING_MAX: usize = 1024;
/// Bytes of peers' KV that wait for one creditor's device before it stops reading more (one frame may exceed it).
pub const REMOTE_REQUEST_WRITE_BYTES_MAX: usize = 64 << 20;
/// Control messages that wait for one peer to be dialled.
pub const PEER_PENDING_MAX: usize = 256;
/// Times that a sequence may lose KV within [`RECOVERIES_WINDOW_MS`] before it fails.
pub const RECOVERIES_MAX: usize = 8;
/// See [`RECOVERIES_MAX`].
pub const RECOVERIES_WINDOW_MS: u64 = 60_000;
/// Time that a sequence that lost KV keeps the rest while it looks for memory for what was lost.
pub const RESTORE_DEADLINE_MS: u64 = 10_000;
/// An instance without own decode steps for so long has no latency target to protect from its remote requests.
pub const THRESHOLD_IDLE_MS: u64 = 2_000;
/// Own steps are far over their latency target for so long before a remote request is refused.
pub const THRESHOLD_OVER_MS: u64 = 1_000;
/// Time between two such refusals.
pub const THRESHOLD_SHED_PAUSE_MS: u64 = 10_000;
/// A sequence with fewer whole rBlocks here is not swapped out in host memory: there is little to gain.
pub const SWAP_OUT_BLOCKS_MIN: u32 = 4;
/// Time that swapping out may take before the sequence goes on as it was.
pub const SWAP_OUT_DEADLINE_MS: u64 = 5_000;
/// A sequence that could not be swapped out is not tried again for so long.
pub const SWAP_OUT_RETRY_MS: u64 = 2_000;
/// Time that borrowing waits for a gManager that is away.
pub const GMANAGER_WAIT_MS: u64 = 30_000;
/// Pause before a sequence that found no memory is tried again.
pub const ADMISSION_RETRY_MS: u64 = 100;
/// That pause at most: it doubles while there is none.
pub const ADMISSION_RETRY_MAX_MS: u64 = 2_000;
/// rBlocks that a growing sequence borrows at once.
pub const GROWTH_BLOCKS: u32 = 2;
/// Time that a debt may be frozen for DGFM, whatever the gManager asks.
pub const FREEZE_MS_MAX: u64 = 30_000;
/// Time to establish a connection to a peer.
pub const CONNECT_DEADLINE_MS: u64 = 5_000;

/// Tokens of KV that move in one step, for each sequence that grows in it, before any overlap was measured (v2 §7.4,
/// Figure 12a).
pub const MOVE_TOKENS_PER_STEP: u32 = 16;
/// That number at most, however well moves overlap.
pub const MOVE_TOKENS_PER_STEP_MAX: u32 = 4096;
/// Bytes of moves in flight at most (or two rBlocks, where those are more).
pub const MOVE_BYTES_IN_FLIGHT_MAX: u64 = 32 << 20;
/// Nor more than a link carries in so long, or two layers of a block: what steps write waits behind it.
pub const MOVE_WINDOW_MS: u64 = 20;
/// Moves of one instance at once.
pub const INSTANCE_MOVES_MAX: usize = 64;
/// A reservation for a move that is not written for this long is freed.
pub const MOVE_RESERVE_MS: u64 = 3_000;
/// Time that a move may take at most, whatever its order says.
pub const MOVE_MS_MAX: u64 = 60_000;
/// Time that debtors have to give recalled blocks back.
pub const RECALL_DEADLINE_MS: u64 = 3_000;
/// A debtor does not borrow from a creditor again for so long after a recall.
pub const RECALL_PAUSE_MS: u64 = 2_000;

const _: () = assert!(LEASE_ANSWER_MS < MOVE_RESERVE_MS && MOVE_RESERVE_MS * 2 < LEASE_TTL_MS);
const _: () = assert!(RECALL_DEADLINE_MS < BORROW_DEADLINE_MS && MOVE_TOKENS_PER_STEP <= MOVE_TOKENS_PER_STEP_MAX);
const _: () = assert!(HEARTBEAT_MS * 4 <= HEARTBEAT_STALE_MS);
const _: () = assert!(HEARTBEAT_STALE_MS < FENCE_MS && FENCE_MS < LEASE_TTL_MS && FENCE_REPEAT_MS < LEASE_TTL_MS);
const _: () = assert!(VIEW_MS <= HEARTBEAT_MS && PLAN_WAIT_MS < PLAN_MS && HEARTBEAT_MS < PLAN_WAIT_MS);
const _: () = assert!(MOVE_RETRY_MS <= MOVE_RETRY_MAX_MS && MOVE_REST_MS <= MOVE_RETRY_MS);
const _: () = assert!(MOVE_REST_MS <= MOVE_BY_HAND_REST_MS);
// A row takes at most 24 bytes, a link 22, a debt 12.
const _: () =
    assert!(HEARTBEAT_ROWS_MAX * 24 + HEARTBEAT_LINKS_MAX * 22 + INSTANCES_MAX * 12 < CONTROL_FRAME_BYTES_MAX);
const _: () = assert!(ADMIN_ROWS_MAX * 40 < CONTROL_FRAME_BYTES_MAX);
const _: () = assert!(LEASE_RENEW_MS * 3 <= LEASE_TTL_MS);
const _: () = assert!(STEP_DEADLINE_MS < LEASE_TTL_MS);
const _: () = assert!(LEASE_ANSWER_MS * (CANDIDATES as u64) < BORROW_DEADLINE_MS);
const _: () = assert!(CONTROL_REPEAT_MS < BORROW_DEADLINE_MS && CONTROL_REPEAT_MS < LEASE_TTL_MS);
const _: () = assert!(LEASE_TTL_MS <= INSTANCE_FORGET_MS && HEARTBEAT_STALE_MS < INSTANCE_FORGET_MS);
const _: () = assert!(BORROW_DEADLINE_MS < RESTORE_DEADLINE_MS && GMANAGER_WAIT_MS < ADMISSION_DEADLINE_MS);
const _: () =
    assert!(RECOVERIES_WINDOW_MS / THRESHOLD_SHED_PAUSE_MS < RECOVERIES_MAX as u64, "remote requests survive shedding");
const _: () = assert!(STEP_ROWS_DEFAULT <= STEP_ROWS_MAX);
const _: () = assert!(BLOCK_TOKENS_DEFAULT <= BLOCK_TOKENS_MAX);
const _: () = assert!(CONTROL_FRAME_BYTES_MAX <= DATA_FRAME_BYTES_MAX && DATA_FRAME_BYTES_MAX <= PEER_QUEUE_BYTES_MAX);
const _: () = assert!(PREFACE_BYTES_MAX <= CONTROL_FRAME_BYTES_MAX);
const _: () = assert!(TICKET_SEQS_MAX <= STEP_ROWS_MAX && TICKET_SEQS_MAX <= TICKET_RUNS_MAX);
const _: () = assert!(SEQUENCE_TOKENS_MAX <= u32::MAX / 2);

// Disaggregated serving (KVDirect §4.2).
/// Workers that prefill for others, in one list.
pub const WORKERS_MAX: usize = 8 << 10;
/// Tokens in one message of a prefill request.
pub const PREFILL_TOKENS_MAX: usize = 128 << 10;
/// Prefills that one decode worker has one worker do at once; others wait.
pub const PREFILL_ASKED_MAX: usize = 64;
/// Prefills that one worker does or keeps for others at once; more are refused.
pub const PREFILL_JOBS_MAX: usize = 4096;
/// Time that a request waits for a worker before its own instance computes the prompt.
pub const PREFILL_WAIT_MS: u64 = 10_000;
/// A worker that refused a request is not asked for it again for so long.
pub const PREFILL_REST_MS: u64 = 1_000;
/// Times that a request's prompt may be given to a worker.
pub const PREFILL_TRIES_MAX: u32 = 8;
/// Time that KV which waits to be read stays with a worker whose connection broke, before the prompt is computed elsewhere.
pub const PREFILL_GRACE_MS: u64 = 2_000;
/// Blocks of prompts of which a decode worker remembers who computed them.
pub const AFFINITY_NAMES_MAX: usize = 1 << 15;
/// An instance whose new role takes no requests accepts those that come so soon after the order: dispatchers have heard of
/// it by then.
pub const ROLE_GRACE_MS: u64 = 2_000;
/// Time between two words to an instance on its role, until it takes that up.
pub const ROLE_REPEAT_MS: u64 = 500;
/// Parts in which the layers of one step are pushed, at most.
pub const PUSH_PARTS: u32 = 8;

// A worker takes at most 72 bytes, a token 4.
const _: () = assert!(WORKERS_MAX * 72 < CONTROL_FRAME_BYTES_MAX && PREFILL_TOKENS_MAX * 4 < CONTROL_FRAME_BYTES_MAX);
const _: () = assert!(PREFILL_WAIT_MS < ADMISSION_DEADLINE_MS && PREFILL_GRACE_MS < LEASE_TTL_MS);

// KV transfer (KVDirect §4).
/// rBlocks of one worker that a layout may name.
pub const TRANSFER_BLOCKS_MAX: u32 = 1 << 26;
/// Planes, and registered regions, of one layout.
pub const TRANSFER_PLANES_MAX: usize = 4096;
/// rBlocks of one export: larger requests are several exports.
pub const EXPORT_BLOCKS_MAX: usize = 16 << 10;
/// Bytes of one read transaction.
pub const TRANSFER_READ_BYTES: u64 = 512 << 10;
/// The same where it is one layer of one rBlock, which is checked while it lands if it comes at once.
pub const TRANSFER_PIECE_BYTES: u64 = 4 << 20;
/// The same at most, also of a peer's.
pub const TRANSFER_READ_BYTES_MAX: u64 = 32 << 20;
/// Pieces that one read transaction may be gathered from.
pub const TRANSFER_SEGMENTS_MAX: usize = 1024;
/// Bytes that were asked for and have not arrived, on one connection.
pub const TRANSFER_CONN_BYTES: u64 = 16 << 20;
/// The same on all connections of a reader.
pub const TRANSFER_BYTES: u64 = 64 << 20;
/// Requests that one connection transfers or completes at once.
pub const TRANSFER_CONN_REQUESTS_MAX: usize = 1024;
/// Writers that one reader is connected to, and readers of one writer.
pub const TRANSFER_CONNS_MAX: usize = INSTANCES_MAX;
/// Exports that one writer keeps for one reader.
pub const TRANSFER_EXPORTS_MAX: usize = 4096;
/// Time that one read transaction may take before its path is given up.
pub const TRANSFER_READ_MS: u64 = 5_000;
/// Time that a request may be in transfer, reconnects included.
pub const TRANSFER_REQUEST_MS: u64 = 60_000;
/// Time that an export may stand, however often it is renewed.
pub const EXPORT_MS_MAX: u64 = 600_000;
/// Times that a damaged rBlock is read again before its request fails.
pub const TRANSFER_DAMAGE_RETRIES: u32 = 1;

const _: () = assert!(EXPORT_BLOCKS_MAX * (16 + 14) < CONTROL_FRAME_BYTES_MAX);
const _: () = assert!(TRANSFER_READ_BYTES <= TRANSFER_PIECE_BYTES && TRANSFER_PIECE_BYTES <= TRANSFER_CONN_BYTES);
const _: () = assert!(TRANSFER_CONN_BYTES <= TRANSFER_BYTES && TRANSFER_PIECE_BYTES <= TRANSFER_READ_BYTES_MAX);
const _: () = assert!(TRANSFER_READ_BYTES_MAX * 2 <= DATA_FRAME_BYTES_MAX as u64);
const _: () = assert!(TRANSFER_READ_MS < LEASE_TTL_MS && LEASE_TTL_MS < TRANSFER_REQUEST_MS);
const _: () = assert!(TRANSFER_REQUEST_MS <= EXPORT_MS_MAX);
// Renewals name every export of a reader.
const _: () = assert!(TRANSFER_EXPORTS_MAX * 11 < CONTROL_FRAME_BYTES_MAX);
