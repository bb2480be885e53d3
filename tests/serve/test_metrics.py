from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trainer.serve.metrics import _TOTALS, Metrics
from trainer.serve.scheduler import SchedulerCounts


def values(metrics: Metrics) -> dict[str, float]:
    """{name{label values}: value} of what a scraper reads, the model's name and creation times left out."""
    read = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
            if not sample.name.endswith("_created"):
                read[sample.name + (f"{{{','.join(labels)}}}" if labels else "")] = sample.value
    return read


def test_a_request_is_counted_once_whatever_n():
    metrics = Metrics("m")
    metrics.arrival()
    metrics.first_token(0.2, 0.05)
    metrics.tokens(0.01, 3)
    metrics.finished(reason="stop", prompt_tokens=10, generation_tokens=8, e2e_s=1.0, n=4)
    read = values(metrics)
    assert read["lowbit:requests_total"] == read["vllm:request_success_total{stop}"] == 1
    assert read["vllm:prompt_tokens_total"] == 10
    assert read["vllm:generation_tokens_total"] == 8
    assert read["vllm:request_params_n_sum"] == 4
    assert read["vllm:request_prompt_tokens_count"] == read["vllm:request_generation_tokens_count"] == 1
    assert read["vllm:time_to_first_token_seconds_sum"] == 0.2
    assert read["vllm:request_queue_time_seconds_sum"] == 0.05
    assert read["vllm:inter_token_latency_seconds_count"] == 3
    assert read["vllm:e2e_request_latency_seconds_count"] == 1


def test_totals_of_the_scheduler_grow_by_their_difference():
    metrics, counts = Metrics("m"), SchedulerCounts(prefix_queries=10, prefix_hits=4, preempted_swap=1)
    metrics.counts(counts)
    metrics.counts(counts)
    counts.prefix_queries, counts.preempted_recompute = 30, 2
    metrics.counts(counts)
    read = values(metrics)
    assert read["vllm:prefix_cache_queries_total"] == 30
    assert read["vllm:prefix_cache_hits_total"] == 4
    assert read["vllm:num_preemptions_total{swap}"] == 1
    assert read["vllm:num_preemptions_total{recompute}"] == 2


def test_every_total_of_the_scheduler_has_a_metric():
    assert {field.name for field in fields(SchedulerCounts)} <= _TOTALS.keys()


def test_gauges_tell_the_present():
    metrics = Metrics("m")
    metrics.gauges(running=3, waiting=2, usage=0.5)
    metrics.gauges(running=0, waiting=0, usage=0.0)
    metrics.adapters(["b", "a"], max_loras=4)
    metrics.adapters(["a"], max_loras=4)
    metrics.cache_config(block_size=16, num_gpu_blocks=100)
    read = values(metrics)
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    assert [read[name] for name in gauges] == [0, 0, 0]
    assert [name for name in read if name.startswith("vllm:lora_requests_info")] == ["vllm:lora_requests_info{4,a}"]
    assert read["vllm:cache_config_info{16,100}"] == 1


@pytest.mark.parametrize(
    "name",
    [
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total"),
        *("vllm:generation_tokens_total", "vllm:iteration_tokens_total_count", "vllm:admission_rejections_total"),
        *("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
    ],
)
def test_names_are_vllms_and_there_from_the_start(name):
    """Dashboards and vllm's bench client read these; a series that appears later looks like a reset."""
    assert values(Metrics("m"))[name] == 0


def test_two_engines_in_a_process_do_not_mix():
    one, other = Metrics("a"), Metrics("b")
    one.rejected()
    one.counts({"accepted": 3})
    assert values(one)["vllm:admission_rejections_total"] == 1
    assert values(one)["vllm:spec_decode_num_accepted_tokens_total"] == 3
    assert values(other)["vllm:admission_rejections_total"] == 0
