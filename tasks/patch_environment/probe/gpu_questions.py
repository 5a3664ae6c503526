"""What a child process asks of torch; the program prints one line of JSON at last."""

# Whether the functions can be imported; that they compute rightly is found out by `attention.py` at a run's own shapes.
ATTENTION = """
import json, torch
from infini_llama.model.flash import PLACES, function_of
report = {"gpus": [], "nccl": torch.distributed.is_nccl_available(), "attention": {}}
for backend in PLACES:
    try:
        function_of(backend)
        report["attention"][backend] = ""
    except BaseException as error:
        report["attention"][backend] = str(error.__cause__ or error)
"""
DEVICES = """
torch.cuda.init()
for index in range(torch.cuda.device_count()):
    with torch.cuda.device(index):
        p = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    report["gpus"].append({"name": p.name, "capability": [p.major, p.minor], "memory": total, "free": free, "bf16": bf16,
                           "uuid": str(getattr(p, "uuid", ""))})
"""
ANSWER = """
print("\\n" + json.dumps(report))
"""
QUESTIONS = ATTENTION + DEVICES + ANSWER
