import torch

from flow_grpo.guidance import classifier_free


def test_guidance_extrapolates_from_the_negative_through_the_prompt():
    negative, positive = torch.tensor([[1.0, -2.0]]), torch.tensor([[2.0, 2.0]])
    # 1 + 4.5 * (2 - 1) = 5.5 and -2 + 4.5 * (2 + 2) = 16.
    assert classifier_free(negative, positive, 4.5).tolist() == [[5.5, 16.0]]
    assert torch.equal(classifier_free(negative, positive, 1.0), positive)
    assert torch.equal(classifier_free(negative, positive, 0.0), negative)


def test_the_gradient_flows_through_both_branches():
    negative, positive = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    classifier_free(negative, positive, 4.0).sum().backward()
    assert negative.grad.tolist() == [-3.0] * 3  # 1 - scale
    assert positive.grad.tolist() == [4.0] * 3
