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
/// Most experts of a layer.
pub const EXPERTS_MAX: u32 = 1 << 10;
/// Most experts of a token.
pub const EXPERTS_PER_TOKEN_MAX: u32 = 32;
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
/// Creditors that the gManager recommends in one answer (v1 §4.4).
pub const CANDIDATES: usize = 3;
/// Candidates of a borrow that is divided into stripes before no more are asked for: half of [`CREDITORS_MAX`].
pub const STRIPE_CANDIDATES_MAX: usize = 32;
/// A stripe is at least one part in these of the debtor's memory. A creditor's attention to 1/16 of what fills an A100 beside LLaMA2-7B
/// takes as long as a row's queries over 125 MB/s.
pub const STRIPES_PER_MEMORY: u32 = 16;
/// Instances that a borrow query excludes; further ones are recommended all the same.
pub const EXCLUDE_MAX: usize = 1 << 10;
/// Points of a calibration: one with more is none.
pub const CALIBRATION_POINTS_MAX: usize = 256;
/// Queries to the gManager before a borrow fails.
pub const BORROW_ROUNDS_MAX: u32 = 8;

/// Largest control frame, in bytes.
pub const CONTROL_FRAME_BYTES_MAX: usize = 1 << 20;
/// Largest partials or bulk frame, in bytes. Larger payloads are split.
pub const DATA_FRAME_BYTES_MAX: usize = 64 << 20;
/// Frames that wait for one peer and class before senders are pushed back.
pub const PEER_QUEUE_FRAMES_MAX: usize = 1024;
/// Bytes that wait for one peer and class before senders are pushed back.
pub const PEER_QUEUE_BYTES_MAX: usize = 256 << 20;
/// Bytes queued for all sessions of one node together: as much as one session's three classes.
pub const NODE_QUEUE_BYTES_MAX: usize = 3 * PEER_QUEUE_BYTES_MAX;
/// Largest transport preface, in bytes.
pub const PREFACE_BYTES_MAX: usize = 1 << 10;
/// Sequences in one step ticket.
pub const TICKET_SEQS_MAX: usize = 1024;
/// Lease runs in one step ticket, over all its sequences.
pub const TICKET_RUNS_MAX: usize = 16 << 10;
/// Human-readable text of a refusal, in bytes; encoding truncates longer text.
pub const DETAIL_BYTES_MAX: usize = 1 << 10;
/// Instances in one pool.
pub const INSTANCES_MAX: usize = 16 << 10;
/// Waiting requests whose rBlock counts a heartbeat carries.
pub const LOAD_QUEUE_MAX: usize = 32;

/// Rows of the request placement map in one heartbeat; further rows follow in the next heartbeats.
pub const HEARTBEAT_ROWS_MAX: usize = 16 << 10;
/// Rows of the request placement map that a gManager keeps of one instance.
pub const PLACEMENT_ROWS_MAX: usize = 1 << 20;
/// Measured links in one heartbeat.
pub const HEARTBEAT_LINKS_MAX: usize = 64;
/// Rows of the request placement map in one reply to an operator.
pub const ADMIN_ROWS_MAX: usize = 8 << 10;
/// Operators' orders of which a gManager keeps the outcome.
pub const ADMIN_ORDERS_MAX: usize = 1 << 10;
/// `move_kvcache` orders in progress at once in a pool.
pub const MOVES_MAX: usize = 16 << 10;

/// Time between heartbeats.
pub const HEARTBEAT_MS: u64 = 250;
/// An instance without a heartbeat for this long is not recommended any more.
pub const HEARTBEAT_STALE_MS: u64 = 2_000;
/// An instance without a heartbeat for this long is fenced: its loans are written off, its debts are freed.
pub const FENCE_MS: u64 = 6_000;
/// Time after which a fence is sent again, until [`LEASE_TTL_MS`] after it: leases have expired by then.
pub const FENCE_REPEAT_MS: u64 = 1_000;
/// A gManager that handled no event for this long was itself stopped: it fences no instance for that pause.
pub const GMANAGER_PAUSE_MS: u64 = 1_000;
/// Time between two sorts of the gManager's view of creditors; small pools are sorted at every change.
pub const VIEW_MS: u64 = 50;
/// A pool-sized request that waits for this long may become the oldest waiting one, ahead of all younger requests.
pub const OLDEST_WAITING_MS: u64 = 10_000;
/// An instance keeps its memory for the oldest waiting request for this long after the last notice of it.
pub const OLDEST_WAITING_HOLD_MS: u64 = 1_000;
/// Time between planning rounds.
pub const PLAN_MS: u64 = 1_000;
/// Time that a planning round waits for missing heartbeats.
pub const PLAN_WAIT_MS: u64 = 500;
/// Time that an order to move KV may take.
pub const MOVE_DEADLINE_MS: u64 = 10_000;
/// Time after [`MOVE_DEADLINE_MS`] until the gManager stops waiting for the order's outcome.
pub const MOVE_GRACE_MS: u64 = 2_000;
/// Pause before the planner moves KV of the same request again.
pub const MOVE_REST_MS: u64 = 1_000;
/// The same pause after a failed move; each further failure doubles it, up to [`MOVE_RETRY_MAX_MS`].
pub const MOVE_RETRY_MS: u64 = 2_000;
/// See [`MOVE_RETRY_MS`].
pub const MOVE_RETRY_MAX_MS: u64 = 32_000;
/// The same pause after a move that an operator ordered.
pub const MOVE_BY_HAND_REST_MS: u64 = 10_000;
/// Time between two checks of the blocks left on a draining instance.
pub const DRAIN_MS: u64 = 500;
/// A drained instance may stop after this long without work: dispatchers know of the drain by then.
pub const DRAIN_QUIET_MS: u64 = 2_000;
/// A lease that is not renewed for this long is released by the creditor.
pub const LEASE_TTL_MS: u64 = 15_000;
/// Longest time to live of a lease that a debtor accepts from a creditor's grant. Dropping the lease earlier is safe.
pub const LEASE_TTL_MS_MAX: u64 = 600_000;
/// Time between renewals of leases.
pub const LEASE_RENEW_MS: u64 = 3_000;
/// Leases in one renewal (10 bytes each at most, well under a control frame); a creditor renews no more with one message.
pub const LEASE_RENEW_LEASES_MAX: usize = 32_768;
/// Block hashes (32 bytes each) in one message of a debtor about a lease; a longer run takes several.
pub const LEASE_HASHES_MAX: usize = 16_384;
/// Block hashes of a prompt for which the pool's prefix cache is asked, from the first on.
pub const SEARCH_HASHES_MAX: usize = 65_536;
/// Fingerprints of block hashes (8 bytes each) in an instance's summary of its prefix cache.
pub const CACHE_SUMMARY_HASHES: usize = 1024;
/// Time between two summaries of an instance's prefix cache.
pub const CACHE_SUMMARY_MS: u64 = 1_000;
/// Cached runs of a prompt in one advice.
pub const CACHED_RUNS_MAX: usize = 256;
/// Looks at summaries for one search: members times the prompt's blocks, of which a large pool's gManager takes the first.
pub const SEARCH_LOOKS_MAX: usize = 1 << 20;
const _: () = assert!(SEARCH_LOOKS_MAX / INSTANCES_MAX >= 64);
/// Leases of cached runs for one prompt; the rest of it is computed.
pub const CACHED_LEASES_MAX: usize = 32;
const _: () = assert!(CACHED_LEASES_MAX * 2 <= CREDITORS_MAX);
/// Time for the search of a prompt's cached runs on other instances; then what was leased is used, and the rest computed.
pub const PREFIX_SEARCH_MS: u64 = 1_000;
/// Members of a joint prefill, the owner included.
pub const JOINT_MEMBERS_MAX: usize = 8;
/// Tokens to compute below which a prompt is computed by its instance alone: the exchange of a step, and the steps at the beginning
/// in which members wait for each other, must be small against it.
pub const JOINT_TOKENS_MIN: u32 = 4_096;
/// Predicted time to compute a prompt alone from which on `--prefill-instances auto` asks others.
pub const JOINT_ALONE_MS: u32 = 2_000;
/// Stripes that each member of a joint prefill computes at least.
pub const JOINT_STRIPES_MIN: u32 = 2;
/// Time for candidates to answer whether they join, and for members to allocate memory and meet; then the owner computes alone.
pub const JOINT_ASK_MS: u64 = 1_000;
/// See [`JOINT_ASK_MS`]; a prompt is sent meanwhile.
pub const JOINT_GRANT_MS: u64 = 3_000;
/// Time for members to tell what they have computed when a joint prefill ends; the owner computes the parts of silent ones again.
pub const JOINT_END_MS: u64 = 2_000;
/// Joint prefills of others that one instance takes part in at once.
pub const JOINT_JOBS_MAX: usize = 2;
/// An instance refuses to join if the tokens of prompts that it has still to compute exceed this percentage of those of its part.
pub const JOINT_BUSY_PERCENT: u64 = 50;
/// A step that waits longer than this for a peer's partials fails its sequences.
pub const STEP_DEADLINE_MS: u64 = 10_000;
/// A device that finishes no layer of a step for this long hangs: the process ends, and other instances take its requests.
/// The default of `--device-timeout-s`.
pub const DEVICE_STUCK_MS: u64 = 120_000;
/// Time that a borrow may take, rounds included, before the request goes back to waiting.
pub const BORROW_DEADLINE_MS: u64 = 5_000;
/// Time that a creditor may take to answer a lease request before the next candidate is tried.
pub const LEASE_ANSWER_MS: u64 = 1_500;
/// Time after which an unanswered borrow query or release is sent again.
pub const CONTROL_REPEAT_MS: u64 = 1_000;
/// The gManager forgets an instance without a heartbeat for this long.
pub const INSTANCE_FORGET_MS: u64 = 60_000;
/// Time that a request may wait for admission.
pub const ADMISSION_DEADLINE_MS: u64 = 600_000;
/// Open steps of peers (tickets) on one creditor.
pub const REMOTE_REQUEST_TICKETS_MAX: usize = 1024;
/// Open steps of one peer on one creditor. A debtor has two (one of each micro-batch), and those that it has cancelled.
pub const REMOTE_REQUEST_PEER_TICKETS_MAX: usize = REMOTE_REQUEST_TICKETS_MAX / 4;
/// Queries and reads of peers that wait for KV or run on the device of one creditor.
pub const REMOTE_REQUEST_WAITING_MAX: usize = 4096;
/// The same of one peer. Its moves read a layer of a block with each frame, up to [`MOVE_BYTES_IN_FLIGHT_MAX`] at once.
pub const REMOTE_REQUEST_PEER_WAITING_MAX: usize = REMOTE_REQUEST_WAITING_MAX / 4;
/// Decoded bytes of one peer's tickets and of its queries that wait for KV or run on the device of one creditor. A peer has
/// one query of each of its two micro-batches there.
pub const REMOTE_REQUEST_PEER_BYTES_MAX: usize = 256 << 20;
/// Bytes of peers' KV that wait for one creditor's device before it stops reading more (one frame may exceed it).
pub const REMOTE_REQUEST_WRITE_BYTES_MAX: usize = 64 << 20;
/// Creditors on one host that answer a step as one: a relay and its members.
pub const RELAY_CREDITORS_MAX: usize = 16;
/// Relayed queries of a debtor that wait for their ticket: one layer of each of its steps, and few that overtake a cancellation.
pub const RELAY_EARLY_MAX: usize = 8;
/// Pause after a step that a host's relay did not answer, or after it was notified of members, in which its creditors are asked
/// directly. Each further failure doubles it.
pub const RELAY_REST_MS: u64 = 250;
/// Largest such pause. After a step's deadline it is this one: directly asked, the creditor that does not answer is found meanwhile.
pub const RELAY_REST_MS_MAX: u64 = 60_000;
/// Bytes of the name of a host.
pub const HOST_NAME_BYTES_MAX: usize = 128;
/// Control messages that wait for one peer to be dialled.
pub const PEER_PENDING_MAX: usize = 256;
/// Losses of KV within [`RECOVERIES_WINDOW_MS`] after which a sequence fails.
pub const RECOVERIES_MAX: usize = 8;
/// See [`RECOVERIES_MAX`].
pub const RECOVERIES_WINDOW_MS: u64 = 60_000;
/// Time that a sequence with lost ranges keeps its other KV while it looks for memory for them.
pub const RESTORE_DEADLINE_MS: u64 = 10_000;
/// An instance without decode steps of its own for this long applies no latency target to remote requests.
pub const THRESHOLD_IDLE_MS: u64 = 2_000;
/// Own steps must miss their latency target by far for this long before a remote request is refused.
pub const THRESHOLD_OVER_MS: u64 = 1_000;
/// Time between two such refusals.
pub const THRESHOLD_SHED_PAUSE_MS: u64 = 10_000;
/// A sequence with fewer full local rBlocks is not swapped out to host memory: it would gain little.
pub const SWAP_OUT_BLOCKS_MIN: u32 = 4;
/// Deadline of a swap-out; after it the sequence stays in place.
pub const SWAP_OUT_DEADLINE_MS: u64 = 5_000;
/// Pause after a failed swap-out of a sequence.
pub const SWAP_OUT_RETRY_MS: u64 = 2_000;
/// Time that a borrow waits for an unreachable gManager.
pub const GMANAGER_WAIT_MS: u64 = 30_000;
/// Time after a registration in which the pool counts as no smaller than before: others register with a new gManager too.
pub const POOL_HOLD_MS: u64 = 10_000;
/// Pause after a failed admission for want of memory.
pub const ADMISSION_RETRY_MS: u64 = 100;
/// Largest such pause: each failure doubles it.
pub const ADMISSION_RETRY_MAX_MS: u64 = 2_000;
/// rBlocks that a growing sequence borrows at once.
pub const GROWTH_BLOCKS: u32 = 2;
/// Longest freeze of a debt for DGFM; a longer one in the gManager's order is cut.
pub const FREEZE_MS_MAX: u64 = 30_000;
/// Time to establish a connection to a peer. A frame that waits for one for this long is dropped.
pub const CONNECT_DEADLINE_MS: u64 = 5_000;
/// Time of one attempt to connect, preface included.
pub const CONNECT_ATTEMPT_MS: u64 = CONNECT_DEADLINE_MS / 2;
/// Pause after a failed attempt to connect. Each further failure doubles it, up to [`CONNECT_PAUSE_MS_MAX`].
pub const CONNECT_PAUSE_MS: u64 = 20;
/// See [`CONNECT_PAUSE_MS`].
pub const CONNECT_PAUSE_MS_MAX: u64 = 1_000;
/// A peer that is silent for this long is lost.
pub const PEER_SILENCE_MS: u64 = 2_500;
/// Time between two keep-alives of a connection that carries nothing else.
pub const PEER_KEEP_ALIVE_MS: u64 = 500;
/// Bytes in flight or unread on one connection and direction.
pub const CONNECTION_UNREAD_BYTES_MAX: u32 = 32 << 20;
/// Unread bytes of all connections of one node (certificate), beside those that each begins with.
pub const NODE_UNREAD_BYTES_MAX: u32 = 512 << 20;
/// Accepted connections from one IPv4 address or /64 network of IPv6.
pub const PEER_ADDRESS_CONNECTIONS_MAX: usize = INSTANCES_MAX * 4;

/// Tokens of KV moved per step and growing sequence before any overlap was measured (v2 §7.4, Figure 12a).
pub const MOVE_TOKENS_PER_STEP: u32 = 16;
/// Upper bound of that number, however well moves overlap.
pub const MOVE_TOKENS_PER_STEP_MAX: u32 = 4096;
/// Bytes in flight of moves at most (or two rBlocks, if larger).
pub const MOVE_BYTES_IN_FLIGHT_MAX: u64 = 32 << 20;
/// Bytes in flight of moves are also at most what the link carries in this time (or two layers of a block), because
/// steps' KV writes queue behind them.
pub const MOVE_WINDOW_MS: u64 = 20;
/// Moves of one instance at once.
pub const INSTANCE_MOVES_MAX: usize = 64;
/// A reservation for a move that is not written for this long is freed.
pub const MOVE_RESERVE_MS: u64 = 3_000;
/// Longest time of a move; a longer deadline in its order is cut.
pub const MOVE_MS_MAX: u64 = 60_000;
/// Time that debtors have to return recalled blocks.
pub const RECALL_DEADLINE_MS: u64 = 3_000;
/// Pause after a recall before the debtor borrows from that creditor again.
pub const RECALL_PAUSE_MS: u64 = 2_000;

const _: () = assert!(LEASE_ANSWER_MS < MOVE_RESERVE_MS && MOVE_RESERVE_MS * 2 < LEASE_TTL_MS);
const _: () = assert!(RECALL_DEADLINE_MS < BORROW_DEADLINE_MS && MOVE_TOKENS_PER_STEP <= MOVE_TOKENS_PER_STEP_MAX);
const _: () = assert!(HEARTBEAT_MS * 4 <= HEARTBEAT_STALE_MS);
const _: () = assert!(PEER_KEEP_ALIVE_MS * 3 <= PEER_SILENCE_MS && CONNECT_PAUSE_MS <= CONNECT_PAUSE_MS_MAX);
const _: () = assert!(CONNECTION_UNREAD_BYTES_MAX <= NODE_UNREAD_BYTES_MAX && HEARTBEAT_STALE_MS < REPLAY_SILENCE_MS);
const _: () = assert!(HEARTBEAT_STALE_MS < FENCE_MS && FENCE_MS < LEASE_TTL_MS && FENCE_REPEAT_MS < LEASE_TTL_MS);
const _: () = assert!(VIEW_MS <= HEARTBEAT_MS && PLAN_WAIT_MS < PLAN_MS && HEARTBEAT_MS < PLAN_WAIT_MS);
const _: () = assert!(MOVE_RETRY_MS <= MOVE_RETRY_MAX_MS && MOVE_REST_MS <= MOVE_RETRY_MS);
const _: () = assert!(MOVE_REST_MS <= MOVE_BY_HAND_REST_MS);
// A row takes at most 24 bytes, a link 22, a debt 12.
const _: () = assert!(
    HEARTBEAT_ROWS_MAX * 24 + HEARTBEAT_LINKS_MAX * 22 + INSTANCES_MAX * 12 + CACHE_SUMMARY_HASHES * 8
        < CONTROL_FRAME_BYTES_MAX
);
const _: () = assert!(ADMIN_ROWS_MAX * 40 < CONTROL_FRAME_BYTES_MAX);
const _: () = assert!(LEASE_RENEW_LEASES_MAX * 12 < CONTROL_FRAME_BYTES_MAX);
const _: () =
    assert!(LEASE_HASHES_MAX * 32 + 64 < CONTROL_FRAME_BYTES_MAX && SEARCH_HASHES_MAX * 8 < CONTROL_FRAME_BYTES_MAX);
const _: () = assert!(CACHED_RUNS_MAX * 128 < CONTROL_FRAME_BYTES_MAX && PREFIX_SEARCH_MS < BORROW_DEADLINE_MS);
const _: () = assert!(LEASE_RENEW_MS * 3 <= LEASE_TTL_MS && LEASE_TTL_MS <= LEASE_TTL_MS_MAX);
const _: () = assert!(STEP_DEADLINE_MS < LEASE_TTL_MS);
const _: () = assert!(LEASE_ANSWER_MS * (CANDIDATES as u64) < BORROW_DEADLINE_MS);
const _: () = assert!(STRIPE_CANDIDATES_MAX + CANDIDATES <= CREDITORS_MAX && STRIPE_CANDIDATES_MAX < EXCLUDE_MAX);
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
const _: () = assert!(3 * DATA_FRAME_BYTES_MAX <= REMOTE_REQUEST_PEER_BYTES_MAX, "two queries and their tickets");
const _: () = assert!(SEQUENCE_TOKENS_MAX <= u32::MAX / 2);
const _: () = assert!(RELAY_CREDITORS_MAX <= CREDITORS_MAX && RELAY_REST_MS <= RELAY_REST_MS_MAX);
const _: () = assert!(2 * STEP_DEADLINE_MS < RELAY_REST_MS_MAX);

// Disaggregated serving (KVDirect §4.2).
/// Prefill workers in one list.
pub const WORKERS_MAX: usize = 8 << 10;
/// Tokens in one message of a prefill request.
pub const PREFILL_TOKENS_MAX: usize = 128 << 10;
/// Prefill requests in progress from one decode worker at one prefill worker; further ones wait.
pub const PREFILL_ASKED_MAX: usize = 64;
/// Maximum of tokens that end a sequence: a model's own, and a request's.
pub const STOP_IDS_MAX: usize = 512;
/// Rows of drafts in one step.
pub const DRAFT_ROWS_MAX: u32 = 64;
/// Longest wait of a step for the draft model's proposals, in milliseconds.
pub const DRAFT_DEADLINE_MS: u64 = 1000;
/// Newest tokens of a sequence in which drafts are looked up.
pub const LOOKUP_TOKENS_MAX: usize = 1 << 16;
/// Entries of a request's `logit_bias`.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Entries of a request's `allowed_token_ids`.
pub const ALLOWED_TOKENS_MAX: usize = 4096;
/// Token sequences of a request's `bad_words`: two a word, with and without a space before it.
pub const BAD_WORDS_MAX: usize = 256;
/// Tokens of one of them.
pub const BAD_WORD_TOKENS_MAX: usize = 64;
/// Waiting time that a unit of a request's priority counts for.
pub const PRIORITY_STEP_MS: u64 = 1_000;
/// Largest priority that counts, of either sign: a request overtakes none that came two minutes before.
pub const PRIORITY_MAX: i32 = 60;
/// Bytes of a request's `cache_salt`, or of a key's name as one.
pub const CACHE_SALT_BYTES_MAX: usize = 512;
/// Bytes of a constraint's grammar.
pub const GRAMMAR_BYTES_MAX: usize = 128 << 10;
/// Texts of a constraint that allows one of several.
pub const CHOICES_MAX: usize = 4096;
/// Tokens at the end of reasoning before a constrained answer.
pub const REASONING_END_MAX: usize = 16;
/// Tokens that one draw excludes: those that would end the sequence too early, and last tokens of bad words.
pub const BANNED_MAX: usize = STOP_IDS_MAX + BAD_WORDS_MAX;
/// Least and largest repetition penalty.
pub const REPETITION_PENALTY_RANGE: (f32, f32) = (0.01, 100.0);
/// Largest presence and frequency penalty, of either sign.
pub const PENALTY_MAX: f32 = 2.0;
/// Prefill jobs that one worker computes or keeps for others; further ones are refused.
pub const PREFILL_JOBS_MAX: usize = 4096;
/// Time that a request waits for a worker before its own instance computes the prompt.
pub const PREFILL_WAIT_MS: u64 = 10_000;
/// Pause before a worker that refused a request is asked for it again.
pub const PREFILL_REST_MS: u64 = 1_000;
/// Times that a request's prompt may be given to a worker.
pub const PREFILL_TRIES_MAX: u32 = 8;
/// Time after a prefill worker's connection broke before a prompt whose KV waits there is sent to another worker.
pub const PREFILL_GRACE_MS: u64 = 2_000;
/// Layers of a cached block that are read at once for a copy in a tier of the prefix cache: passes go on between them.
pub const TIER_READS_IN_FLIGHT: usize = 4;
/// Such reads in one step: they overtake its pass.
pub const TIER_READS_PER_STEP: u32 = 8;
/// Cached blocks that are looked at after one event for the next copy.
pub const TIER_LOOKS_MAX: usize = 64;
/// Blocks that the host tier drops after one event by an operator's order: the memory of larger ones takes milliseconds to free.
pub const TIER_DROPS_MAX: usize = 64;
/// Bytes of KV from tiers of the prefix cache that wait for the device (or one rBlock, if larger).
pub const TIER_LOAD_BYTES_IN_FLIGHT: u64 = 8 << 20;
/// Bytes of such KV that are stored in one step (or one rBlock, if larger): they overtake its pass.
pub const TIER_LOAD_BYTES_PER_STEP: u64 = 32 << 20;
/// rBlocks that are read from the prefix cache's disk tier at once.
pub const TIER_DISK_READS_MAX: usize = 16;
/// Bytes of KV that wait to be written to the prefix cache's disk tier (or one rBlock, if larger).
pub const TIER_DISK_WRITE_BYTES_MAX: u64 = 256 << 20;
/// The same, in rBlocks.
pub const TIER_DISK_WRITES_MAX: usize = 1024;
/// rBlocks of the prefix cache's disk tier.
pub const TIER_DISK_BLOCKS_MAX: usize = 1 << 20;
/// Time after which a prompt waits for no more KV from a tier of the prefix cache: the rest is computed.
pub const TIER_LOAD_DEADLINE_MS: u64 = 10_000;
/// Tenants of which an instance reports how much of its prefix cache they have.
pub const CACHE_TENANTS_MAX: usize = 16;
/// Orders to empty an instance's prefix cache that it has not confirmed.
pub const CACHE_DROPS_MAX: usize = 16;
/// Block hashes of which a decode worker remembers the prefill worker that computed them.
pub const AFFINITY_HASHES_MAX: usize = 1 << 15;
/// Time for which one role must be short of instances, and the other have time to spare, before the gManager changes a role.
pub const ROLE_SUSTAIN_MS: u64 = 5_000;
/// Time between the end of a role change and the gManager's next one.
pub const ROLE_DWELL_MS: u64 = 30_000;
/// An instance whose new role takes no requests accepts them for this long after the order: dispatchers know of it then.
pub const ROLE_GRACE_MS: u64 = 2_000;
/// Time between two role orders to an instance until it acknowledges one.
pub const ROLE_REPEAT_MS: u64 = 500;
/// Parts in which the layers of one step are pushed, at most.
pub const PUSH_PARTS: u32 = 8;

// A worker takes at most 72 bytes, a token 4.
const _: () = assert!(WORKERS_MAX * 72 < CONTROL_FRAME_BYTES_MAX && PREFILL_TOKENS_MAX * 4 < CONTROL_FRAME_BYTES_MAX);
const _: () = assert!(JOINT_ASK_MS + JOINT_GRANT_MS < LEASE_TTL_MS && JOINT_MEMBERS_MAX <= CREDITORS_MAX);
const _: () = assert!(PREFILL_TOKENS_MAX * 4 + GRAMMAR_BYTES_MAX + 16 * CHOICES_MAX < CONTROL_FRAME_BYTES_MAX);
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
/// The same for one whole layer of one rBlock: read at once, it is checked while it is copied.
pub const TRANSFER_PIECE_BYTES: u64 = 4 << 20;
/// Upper bound of a read transaction, also of a peer's.
pub const TRANSFER_READ_BYTES_MAX: u64 = 32 << 20;
/// Segments of one read transaction.
pub const TRANSFER_SEGMENTS_MAX: usize = 1024;
/// Bytes in flight (requested, not arrived) on one connection.
pub const TRANSFER_CONN_BYTES: u64 = 16 << 20;
/// The same on all connections of a reader.
pub const TRANSFER_BYTES: u64 = 64 << 20;
/// Requests that one connection transfers or completes at once.
pub const TRANSFER_CONN_REQUESTS_MAX: usize = 1024;
/// Writers that one reader is connected to, and readers of one writer.
pub const TRANSFER_CONNS_MAX: usize = INSTANCES_MAX;
/// Direct connections that one process accepts.
pub const DIRECT_CONNECTIONS_MAX: usize = 4096;
/// Direct connections of one node (certificate) at one process: of several readers with several each.
pub const DIRECT_CONNECTIONS_NODE_MAX: usize = DIRECT_CONNECTIONS_MAX / 4;
/// Exports that one writer keeps for one reader.
pub const TRANSFER_EXPORTS_MAX: usize = 4096;
/// Time that one read transaction may take before its path counts as broken.
pub const TRANSFER_READ_MS: u64 = 5_000;
/// Time that a request may be in transfer, reconnects included.
pub const TRANSFER_REQUEST_MS: u64 = 60_000;
/// Lifetime of an export, however often it is renewed.
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

// Dispatch by a gateway (engine/cluster/src/dispatch).
/// Requests that wait in one gateway's queue.
pub const GATEWAY_QUEUE_MAX: usize = 4096;
/// Bytes of their bodies.
pub const GATEWAY_QUEUE_BYTES_MAX: usize = 512 << 20;
/// Of both, what one tenant may hold: so many quarters.
pub const GATEWAY_TENANT_QUARTERS: usize = 3;
/// Longest wait in a gateway's queue.
pub const GATEWAY_QUEUE_MS: u64 = ADMISSION_DEADLINE_MS;
/// Prefill that an instance may have ahead of it and get another request all the same: it must not run dry before its next
/// heartbeat is known.
pub const DISPATCH_AHEAD_MS: u64 = 500;
/// Requests that may be started on memory for which the head of the queue waits.
pub const DISPATCH_PASSES_MAX: u32 = 32;
/// Requests behind a waiting head, in their turn, of which those that pass are chosen.
pub const DISPATCH_LOOK_MAX: usize = 64;
/// A head waits for an instance that is predicted to have memory for all of it within so long; without one it is started where it has
/// to borrow.
pub const DISPATCH_SOON_MS: u64 = 30_000;
/// A head that has waited so long is started where it has to borrow, whatever is predicted.
pub const DISPATCH_WHOLE_MS: u64 = 60_000;
/// Time from a dispatch until the instance's heartbeats include it.
pub const DISPATCH_LAG_MS: u64 = 100;
/// A head that waits for the pool's memory goes to an instance when its passes are used up, or after so long: there the pool keeps memory
/// for it.
pub const DISPATCH_POOL_MS: u64 = 10_000;
/// A request that waits for its cached prefix at a busy instance is started elsewhere after so long.
pub const DISPATCH_PREFIX_MS: u64 = 30_000;
/// Interval of a gateway's looks at its queue while requests wait.
pub const DISPATCH_TICK_MS: u64 = 25;
/// Time after which an instance gives a waiting request back to a gateway that takes it.
pub const HAND_BACK_MS: u64 = 1_000;
/// Times that instances may give one request back; then it stays where it is.
pub const HAND_BACKS_MAX: u32 = 3;
/// Time for which a request that an instance gave back does not go there again.
pub const HAND_BACK_REST_MS: u64 = 2_000;
/// Time that queued requests wait for an instance when none is there.
pub const DISPATCH_NONE_MS: u64 = 30_000;
/// Prefix hashes of one prompt that a gateway computes.
pub const PREFIX_HASHES_MAX: usize = 512;
/// Prefix hashes of which a gateway remembers instances.
pub const PREFIX_PLACES_MAX: usize = 1 << 17;
/// Instances that it remembers of a prefix hash, the latest ones.
pub const PREFIX_INSTANCES_MAX: usize = 8;
/// Prefix hashes that a gateway and its gManager send each other at once, of prompts that were sent somewhere.
pub const PLACED_HASHES_MAX: usize = 1 << 14;
/// Instances that one request may lose before it fails.
pub const REPLAYS_MAX: usize = 4;
/// Time after a loss within which another instance must begin to answer.
pub const REPLAY_DEADLINE_MS: u64 = 30_000;
/// Silence after which an instance that the pool counts as dead is lost to the requests that it answers.
pub const REPLAY_SILENCE_MS: u64 = 10_000;
/// Tenants whose past share a gateway remembers.
pub const DISPATCH_TENANTS_MAX: usize = 4096;

const _: () = assert!(2 * HEARTBEAT_MS <= DISPATCH_AHEAD_MS && DISPATCH_LAG_MS < HEARTBEAT_MS);
// A prefix takes at most 24 bytes beside its hashes.
const _: () = assert!(PLACED_HASHES_MAX * (8 + 24) < CONTROL_FRAME_BYTES_MAX && PREFIX_HASHES_MAX <= PLACED_HASHES_MAX);
const _: () = assert!(
    DISPATCH_POOL_MS < GATEWAY_QUEUE_MS && DISPATCH_PREFIX_MS < GATEWAY_QUEUE_MS && DISPATCH_NONE_MS < GATEWAY_QUEUE_MS
);
