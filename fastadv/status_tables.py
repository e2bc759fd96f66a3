"""What each system writes down about how a rollout ended, and which Ending that is: the tables of docs/outcomes.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastadv.outcomes import Ending

_SUBMITTED, _ENVIRONMENT, _TURNS, _LENGTH = Ending.SUBMITTED, Ending.ENVIRONMENT, Ending.TURN_CAP, Ending.LENGTH_CAP
_CONTEXT, _TIMEOUT, _ERROR, _ABORTED = Ending.CONTEXT_CAP, Ending.TIMEOUT, Ending.ERROR, Ending.ABORTED
_VOID, _UNKNOWN = Ending.VOID, Ending.UNKNOWN


@dataclass(frozen=True)
class StatusTable:
    """The statuses of one system.

    Attributes:
        field: where the status is found.
        statuses: what it can be, as its owner writes it. Empty: the system has none, `note` says what to do.
        source: where its owner writes it, and in which revision.
        note: what the table leaves open.
        flags: the statuses are names of boolean fields, for `statuses.flagged_endings`; the first that is set counts.
        exceptions: any name that ends in Error or Exception is one too, an ERROR.
    """

    field: str
    statuses: Mapping[str, Ending]
    source: str
    note: str = ""
    flags: bool = False
    exceptions: bool = False


# Miles, slime: FAILED is a tool or an API that failed, PENDING a rollout that never finished.
_SAMPLE_STATUS = {
    "completed": _SUBMITTED, "truncated": _LENGTH, "aborted": _ABORTED, "failed": _ERROR, "pending": _ABORTED,
}  # fmt: skip
_TRUNCATED = "truncated is any cap: response tokens, context or turns"

SYSTEMS: dict[str, StatusTable] = {
    "vllm": StatusTable(
        "finish_reason of the rollout's last call",
        {
            "stop": _SUBMITTED, "tool_calls": _SUBMITTED, "length": _LENGTH, "abort": _ABORTED, "error": _ERROR,
            "repetition": _VOID,
        },
        "vllm/v1/engine/__init__.py:FINISH_REASON_STRINGS, and tool_calls of its OpenAI server",
        "length is max_tokens or max_model_len; repetition: the engine found the reply repeating itself",
    ),
    "sglang": StatusTable(
        'meta_info["finish_reason"]["type"] of the rollout\'s last call',
        {"stop": _SUBMITTED, "tool_calls": _SUBMITTED, "length": _LENGTH, "abort": _ABORTED},
        "sglang/srt/managers/schedule_batch.py:FINISH_MATCHED_TOKEN, FINISH_LENGTH, FINISH_ABORT",
    ),
    "verl": StatusTable(
        "TokenOutput.stop_reason",
        {
            "completed": _UNKNOWN, "aborted": _ABORTED, "abort": _ABORTED, "stop": _SUBMITTED, "length": _LENGTH,
            "tool_calls": _SUBMITTED,
        },
        "verl/workers/rollout/vllm_rollout/vllm_async_server.py, rollout/schemas.py:FinishReasonTypeEnum @1dda039b9",
        "the vLLM server writes completed for stop and for length, and agent loops pass no reason on: "
        "statuses.derived_endings tells caps by lengths and turns",
    ),
    "verl-agent": StatusTable(
        "none",
        {},
        "agent_system/multi_turn_rollout/rollout_loop.py:vanilla_multi_turn_loop @d501621",
        "the loop ends at env.max_steps without a flag: statuses.derived_endings with max_turns",
    ),
    "slime": StatusTable("Sample.status", _SAMPLE_STATUS, "slime/utils/types.py:Sample.Status @624b824a8", _TRUNCATED),
    "miles": StatusTable("Sample.status", _SAMPLE_STATUS, "miles/utils/types.py:Sample.Status @31f1ca961", _TRUNCATED),
    "miles-agent": StatusTable(
        'Sample.metadata["exit_status"]',
        {
            "Submitted": _SUBMITTED, "NoToolCall": _SUBMITTED, "IntegrityViolation": _SUBMITTED,
            "completed": _SUBMITTED, "TurnLimitExceeded": _TURNS, "SequenceLengthLimitExceeded": _CONTEXT,
            "TimeLimitExceeded": _TIMEOUT, "timeout": _TIMEOUT, "RequestRejected": _VOID, "AgentError": _ERROR,
            "VerifierError": _ERROR, "NoReward": _ERROR, "SandboxUnavailable": _ERROR, "ModelEndpointFailed": _ERROR,
            "VerifierCrashCleanRun": _ERROR, "ServerUnreachable": _ERROR, "EnvironmentTimeout": _ERROR,
            "ClientError": _ERROR, "GenerationAborted": _ABORTED, "Aborted": _ABORTED, "Unknown": _UNKNOWN,
        },
        "agent servers and examples of Miles: Harbor, BenchFlow, OpenEnv "
        "(examples/experimental/openenv/openenv_agent_function.py @31f1ca961)",
        "free text of whichever agent function ran; Miles' own filter counts TimeLimitExceeded as cut off",
    ),
    "rllm": StatusTable(
        "Episode.termination_reason",
        {
            "env_done": _ENVIRONMENT, "max_turns_exceeded": _TURNS, "max_response_length_exceeded": _LENGTH,
            "max_prompt_length_exceeded": _CONTEXT, "timeout": _TIMEOUT, "error": _ERROR, "unknown": _UNKNOWN,
        },
        "rllm/workflows/workflow.py:TerminationReason @9beb6e0f6",
        "env_done is the ordinary end, a submission among it",
    ),
    "deepswe": StatusTable(
        "termination_reason",
        {
            "ENV_DONE": _ENVIRONMENT, "MAX_STEPS": _TURNS, "TRUNCATION": _LENGTH, "PROMPT_TRUNCATION": _CONTEXT,
            "TIMEOUT": _TIMEOUT, "ENV_TIMEOUT": _TIMEOUT,
        },
        "rllm/engine/agent_execution_engine.py @709dec43",
        "overlong_filter masks TRUNCATION, MAX_STEPS and TIMEOUT, whose reward is then not computed",
    ),
    "deepscaler": StatusTable(
        "none",
        {},
        "verl/trainer/ppo/core_algos.py of agentica's rllm",
        "mask_truncated_samples compares the response with its window: statuses.derived_endings with max_length",
    ),
    "prime-rl": StatusTable(
        "trace.stop_condition",
        {
            "agent_completed": _SUBMITTED, "no_tools_called": _SUBMITTED, "user_closed": _ENVIRONMENT,
            "has_final_env_response": _ENVIRONMENT, "max_turns": _TURNS, "max_turns_reached": _TURNS,
            "max_output_tokens": _LENGTH, "max_total_completion_tokens_reached": _LENGTH,
            "max_input_tokens": _CONTEXT, "max_total_tokens": _CONTEXT, "context_length": _CONTEXT,
            "prompt_too_long": _CONTEXT, "timeout_reached": _TIMEOUT, "error": _ERROR, "has_error": _ERROR,
            "empty_action": _VOID,
        },
        "verifiers/v1/trace.py, v1/session.py, legacy/envs/multiturn_env.py @a60a606ec",
        "an environment's own stop functions write their names too (strict=False); a last reply that was cut off ends "
        "agent_completed with trace.is_truncated",
    ),
    "nemo-rl": StatusTable(
        "truncated, max_turns_reached and terminated of a sample",
        {"truncated": _LENGTH, "max_turns_reached": _TURNS, "terminated": _ENVIRONMENT},
        "nemo_rl/experience/rollouts.py:run_multi_turn_rollout, run_sample_multi_turn_rollout",
        "truncated is max_new_tokens or max_seq_len, and such a sample may be terminated too",
        flags=True,
    ),
    "skyrl": StatusTable(
        "stop_reasons of the generator's output",
        {
            "stop": _SUBMITTED, "stop_token": _SUBMITTED, "complete": _SUBMITTED, "completed": _SUBMITTED,
            "tool_calls": _SUBMITTED, "length": _LENGTH, "context_length": _CONTEXT, "agent_timeout": _TIMEOUT,
            "error": _ERROR, "abort": _ABORTED,
        },
        "skyrl/train/generators/skyrl_gym_generator.py, examples/train_integrations/harbor/harbor_generator.py "
        "@a9564572e",
        "a turn cap ends with the engine's own reason: statuses.derived_endings with max_turns",
    ),
    "skyrl-agent": StatusTable(
        "finish_reason",
        {
            "FINISH": _SUBMITTED, "FINISH_TOOL": _SUBMITTED, "max_iterations_reached": _TURNS,
            "CONTEXT_WINDOW_EXCEEDED": _CONTEXT, "cmd_timeout": _TIMEOUT, "error_runtime": _ERROR,
            "error_evaluation": _ERROR, "error": _ERROR, "BAD_LLM_RESPONSE": _VOID, "NO_FUNCTION_CALL": _VOID,
            "stuck_in_a_loop": _ENVIRONMENT,
        },
        "skyrl-agent/skyrl_agent/agents/base.py, agents/oh_codeact/codeact_agent.py @a9564572e",
        "error comes with its text after a colon",
    ),
    "trl": StatusTable(
        "none",
        {},
        "trl/trainer/grpo_trainer.py @f2cd57710",
        "mask_truncated_completions looks at the last token: statuses.derived_endings with last_ids and end_ids",
    ),
    "openrlhf": StatusTable(
        "Experience.truncated",
        {"truncated": _LENGTH},
        "openrlhf/trainer/ppo_utils/samples_generator.py, openrlhf/utils/agent.py @3c3be623",
        "finish_reason == 'length' of the last call; its finish_reason itself is the engine's",
        flags=True,
    ),
    "areal": StatusTable(
        "ModelResponse.stop_reason",
        {"stop": _SUBMITTED, "tool_calls": _SUBMITTED, "length": _LENGTH, "abort": _ABORTED},
        "areal/api/io_struct.py:ModelResponse @4aef98d8d",
        "an abort that is not resumed is written as length; mask_no_eos_with_zero looks at the padded width instead",
    ),
    "roll": StatusTable(
        "EpisodeStopReason or GenerateStopReason, by value or name",
        {
            "finish": _SUBMITTED, "max_length": _LENGTH, "max_steps": _TURNS, "env_timeout": _TIMEOUT,
            "abort": _ABORTED, "env_reset_failed": _ERROR, "sandbox_init_failed": _ERROR,
            "llm_generate_failed": _ERROR, "no_system_prompt": _ERROR, "eval_gt": _ENVIRONMENT, "unknown": _UNKNOWN,
        },
        "roll/utils/constants.py @8eb27cc2",
        "eval_gt: the task's reference solution was run in the agent's place",
    ),
    "mini-o3": StatusTable(
        "exceed_mask and void_mask of the batch",
        {"exceed_mask": _TURNS, "void_mask": _VOID},
        "verl/workers/rollout/vllm_rollout/vllm_async_engine.py @8654dbf",
        "exceed_mask is a call too many at the cap of rounds, of images or of response tokens",
        flags=True,
    ),
    "mini-swe-agent": StatusTable(
        "exit_status",
        {
            "Submitted": _SUBMITTED, "LimitsExceeded": _TURNS, "ContextWindowExceededError": _CONTEXT,
            "TimeExceeded": _TIMEOUT, "TimeoutExpired": _ERROR, "RepeatedFormatError": _VOID, "": _UNKNOWN,
        },
        "minisweagent/agents/default.py @a83fcae8",
        "LimitsExceeded is steps or cost; an exception that nobody caught is written by its class's name",
        exceptions=True,
    ),
}  # fmt: skip
